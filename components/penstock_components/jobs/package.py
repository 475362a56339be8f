"""A local script as a Python package for Google's prebuilt images, started once per accelerator of each node.

    package = package_script(Path("train.py"), requirements=["transformers>=5"], output_dir=Path("build"))
    uri = upload(package, "gs://bucket/packages")
    spec = package.to_spec("us-docker.pkg.dev/vertex-ai/training/...", uri, args=["--lr=1e-4"])

Vertex AI starts one process in each replica and sets RANK and WORLD_SIZE for nodes, not for processes; the prebuilt images
have nothing that would start the others. So the package carries what does: the modules of our own launcher, as they are,
because they need no more than the standard library, google-crc32c and the image's torch. The other way would have been
torchrun with a static rendezvous read from CLUSTER_SPEC, as Google's samples do: a second launcher to keep, whose exit
code is 1 after a rank was killed, which Vertex AI takes for a permanent failure. The package's `penstock_trainer` has the
launcher and nothing else, also on an image that has all of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from penstock_components.jobs import launcher_modules
from penstock_components.jobs.findings import Finding, require
from penstock_components.jobs.messages import EnvVar, PythonPackageSpec
from penstock_components.jobs.script_modules import RULE, ScriptModule, check_modules
from penstock_components.jobs.source_distribution import SourceDistribution
from penstock_trainer.storage import PreconditionFailedError, Storage, join, storage_for

# A distribution of the plain name could replace one that the image has: `evaluate`, for a script evaluate.py.
_DISTRIBUTION_PREFIX = "penstock-script-"
_PYTHON_OF_IMAGE = re.compile(r"\.py(\d)(\d+)(?=[:@]|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How the script is started on each node; see `python -m penstock_trainer launch --help`."""

    processes_per_node: int | None = None
    """None: one for each visible accelerator, or one where there is none."""
    max_restarts: int | None = None
    """Times that all ranks are started again in place. None: the launcher's default."""
    checkpoint_dir: str = ""
    """A directory of the node that is kept in Cloud Storage, below AIP_CHECKPOINT_DIR, and restored from there."""

    def __post_init__(self) -> None:
        for name, least in (("processes_per_node", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                require([_fault(name, f"{name} is {value}.", f"Give {least} or more, or leave it out.")])

    def arguments(self) -> tuple[str, ...]:
        """The launcher's own, up to and with `--`."""
        given = {
            "processes-per-node": self.processes_per_node,
            "max-restarts": self.max_restarts,
            "checkpoint-dir": self.checkpoint_dir or None,
        }
        return ("launch", *(f"--{name}={value}" for name, value in given.items() if value is not None), "--")

    @property
    def requirements(self) -> tuple[str, ...]:
        """What the launcher imports with these settings and an image may not have."""
        storage = launcher_modules.STORAGE_REQUIREMENTS if self.checkpoint_dir else ()
        return (*launcher_modules.REQUIREMENTS, *storage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A source distribution on this machine's disk."""

    path: Path
    sha256: str
    """Of the file, in hexadecimal."""
    module: str
    """The script, as it is imported."""
    launch: Launch | None
    """None: Vertex AI runs the script itself, once in each replica."""

    @property
    def python_module(self) -> str:
        """What Vertex AI runs with `python -m`."""
        return launcher_modules.MODULE if self.launch else self.module

    def to_spec(
        self,
        executor_image_uri: str,
        package_uri: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> PythonPackageSpec:
        """The task of a worker pool that runs the script with `args`, by the `python3` of the image. Raises JobSpecError.

        `package_uri` is where the package was uploaded to. Every pool whose ranks belong together gets the same.
        """
        require(self._unfit(executor_image_uri, package_uri, args))
        command = (*self.launch.arguments(), "python3", "-m", self.module) if self.launch else ()
        return PythonPackageSpec(
            executor_image_uri=executor_image_uri,
            package_uris=(package_uri,),
            python_module=self.python_module,
            args=(*command, *args),
            env=tuple(EnvVar(name=name, value=value) for name, value in sorted((env or {}).items())),
        )

    def _unfit(self, image: str, package_uri: str, args: Sequence[str]) -> Iterator[Finding]:
        if isinstance(args, str):
            yield _one_text("args", args)
        if not image:
            yield _fault(
                "executor_image_uri", "it is empty.", "Give one of Google's prebuilt training images."
            )
        if not re.fullmatch(r"gs://[^/]+/.+\.tar\.gz", package_uri):
            yield _fault(
                "package_uris[0]", f"{package_uri!r} is no source distribution in Cloud Storage.",
                "Upload the package and give gs://BUCKET/.../NAME.tar.gz.",
            )  # fmt: skip
        python = _PYTHON_OF_IMAGE.search(image)
        if self.launch and python and (int(python[1]), int(python[2])) < launcher_modules.PYTHON:
            yield _fault(
                "executor_image_uri",
                f"by its name {image} has Python {python[1]}.{python[2]}; the launcher in the package needs "
                f"{_dotted(launcher_modules.PYTHON)} or later.",
                "Take a later image, a custom container, or launch=None, which starts one process in each replica.",
            )


def package_script(
    script: Path,
    *,
    requirements: Sequence[str] = (),
    name: str | None = None,
    extra_modules: Sequence[Path] = (),
    launch: Launch | None = Launch(),
    output_dir: Path,
) -> Package:
    """Write the script as a source distribution (.tar.gz) into `output_dir`; the same input gives the same SHA-256.

    `requirements` are those of pip's index, as in `transformers>=5`; what the image has need not be named. `name` is the
    module that the script becomes (default: that of its file). `extra_modules` are modules (.py) and packages (folders
    with `__init__.py`, whose other files come along) that it imports. Hidden files and `__pycache__` stay behind. With
    `launch=None` nothing of ours is in the package. Raises JobSpecError with all that is wrong.
    """
    module = script.stem if name is None else name
    modules = [ScriptModule(field="script", name=module, path=script, is_script=True)]
    for index, extra in enumerate(extra_modules):
        stem = extra.stem if extra.suffix == ".py" else extra.name
        modules.append(ScriptModule(field=f"extra_modules[{index}]", name=stem, path=extra))
    taken = {launcher_modules.MODULE: "the launcher"}
    require([*_check_requirements(requirements, taken), *check_modules(modules, taken)])
    files = {below: file.read_bytes() for each in modules for below, file in each.files()}
    required = {*requirements, *(launch.requirements if launch else ())}
    distribution = SourceDistribution(
        name=canonicalize_name(f"{_DISTRIBUTION_PREFIX}{module}"),
        files={**files, **(launcher_modules.launcher_files() if launch else {})},
        requirements=tuple(sorted(str(Requirement(text)) for text in required)),
        python=launcher_modules.PYTHON if launch else None,
    )
    archive = distribution.archive()
    path = output_dir / f"{distribution.stem}.tar.gz"
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive)
    return Package(path=path, sha256=hashlib.sha256(archive).hexdigest(), module=module, launch=launch)


def upload(package: Package, prefix_uri: str, storage: Storage | None = None) -> str:
    """Put the package below a gs:// prefix under its hash and return its URI; nothing is written where it is already.

    `storage` is that of the URI's scheme by default. Raises StorageError.
    """
    uri = join(prefix_uri, package.sha256, package.path.name)
    with suppress(PreconditionFailedError):  # the name holds the hash, so the object holds these bytes
        (storage or storage_for(uri)).write(uri, package.path.read_bytes(), if_generation_match=0)
    return uri


def _check_requirements(requirements: Sequence[str], taken: dict[str, str]) -> Iterator[Finding]:
    """What is wrong with them. Adds to `taken` the module that each most often brings."""
    if isinstance(requirements, str):
        yield _one_text("requirements", requirements)
        return
    for index, text in enumerate(requirements):
        try:
            name = canonicalize_name(Requirement(text).name)
        except InvalidRequirement as exc:
            yield _fault(
                f"requirements[{index}]",
                f"{text!r} is no requirement: {str(exc).splitlines()[0]}.",
                "Write it as in a wheel's metadata: transformers>=5, or NAME @ https://... ; options of pip and paths "
                "have no place there.",
            )
        else:
            taken[name.replace("-", "_")] = repr(text)


def _one_text(field: str, text: str) -> Finding:
    return _fault(field, f"it is one text, {text!r}.", f"Give a list: {field}=[{text!r}].")


def _fault(path: str, reason: str, fix: str) -> Finding:
    return Finding(path=path, rule=RULE, reason=reason, fix=fix)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
