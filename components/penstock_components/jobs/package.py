"""A local script as a Python package for Google's prebuilt images, started once per accelerator of each node.

    package = package_script(Path("train.py"), requirements=["transformers>=5"], output_dir=Path("build"))
    uri = upload(package, "gs://bucket/packages")
    spec = package.to_spec("us-docker.pkg.dev/vertex-ai/training/...", uri, args=["--lr=1e-4"])

Vertex AI starts one process in each replica and sets RANK and WORLD_SIZE for nodes, not for processes; the prebuilt images
have nothing that would start the others. So the package carries what does: the modules of our own launcher, as they are,
because they need no more than the standard library, google-crc32c and the image's torch. The other way would have been
torchrun with a static rendezvous read from CLUSTER_SPEC, as Google's samples do; it would be a second launcher to keep,
gives up when a node is late, and ends with 1 after a rank was killed, which Vertex AI takes for a permanent failure.
"""

from __future__ import annotations

import ast
import hashlib
import keyword
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from penstock_components.jobs import launcher_modules
from penstock_components.jobs.findings import Finding, require
from penstock_components.jobs.messages import EnvVar, PythonPackageSpec
from penstock_components.jobs.source_distribution import SourceDistribution
from penstock_trainer.storage import PreconditionFailedError, Storage, join, storage_for

# A distribution of the plain name could replace one that the image has: `evaluate`, for a script evaluate.py.
_DISTRIBUTION_PREFIX = "penstock-script-"
_OLDEST_PYTHON = (3, 8)
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
        """The task of a worker pool that runs the script with `args`. Raises JobSpecError.

        `package_uri` is where the package was uploaded to. Every pool whose ranks belong together gets the same.
        """
        require(self._unfit(executor_image_uri, package_uri))
        command = (*self.launch.arguments(), "python3", "-m", self.module) if self.launch else ()
        return PythonPackageSpec(
            executor_image_uri=executor_image_uri,
            package_uris=(package_uri,),
            python_module=self.python_module,
            args=(*command, *args),
            env=tuple(EnvVar(name=name, value=value) for name, value in sorted((env or {}).items())),
        )

    def _unfit(self, image: str, package_uri: str) -> Iterator[Finding]:
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
    modules = [(module, script), *((extra.stem, extra) for extra in extra_modules)]
    require([*_bad_requirements(requirements), *_bad_modules(modules, requirements)])
    files = {f"{module}.py": script.read_bytes()}
    for extra in extra_modules:
        files |= dict(_files_of(extra))
    required = {*requirements, *(launch.requirements if launch else ())}
    distribution = SourceDistribution(
        name=canonicalize_name(f"{_DISTRIBUTION_PREFIX}{module}"),
        files={**files, **(launcher_modules.launcher_files() if launch else {})},
        requirements=tuple(sorted(str(Requirement(text)) for text in required)),
        python=launcher_modules.PYTHON if launch else _OLDEST_PYTHON,
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


def _bad_requirements(requirements: Iterable[str]) -> Iterator[Finding]:
    for index, text in enumerate(requirements):
        try:
            Requirement(text)
        except InvalidRequirement as exc:
            yield _fault(
                f"requirements[{index}]", f"{text!r} is no requirement: {str(exc).splitlines()[0]}.",
                "Write it as in a wheel's metadata: transformers>=5, or NAME @ https://... ; options of pip and paths "
                "have no place there.",
            )  # fmt: skip


def _bad_modules(modules: Sequence[tuple[str, Path]], requirements: Iterable[str]) -> Iterator[Finding]:
    taken = {
        launcher_modules.MODULE: "the launcher",
        **{_import_name(text): f"{text!r}" for text in requirements},
    }
    for index, (name, file) in enumerate(modules):
        field = f"extra_modules[{index - 1}]" if index else "script"
        yield from _bad_source(field, file, may_be_package=index > 0)
        if not name.isidentifier() or keyword.iskeyword(name):
            yield _fault(
                field, f"{name!r} is no name of a module.",
                "Give name=, in letters, digits and underscores." if not index else "Rename it.",
            )  # fmt: skip
        elif name in sys.stdlib_module_names:
            yield _fault(
                field, f"a module {name!r} would hide that of the standard library from everything that imports it.",
                "Give it another name.",
            )  # fmt: skip
        elif name in taken:
            yield _fault(field, f"{name!r} is also the module of {taken[name]}.", "Give one another name.")
        taken.setdefault(name, str(file))


def _bad_source(field: str, path: Path, *, may_be_package: bool) -> Iterator[Finding]:
    """What is wrong with a module or a package on disk."""
    if may_be_package and (path / "__init__.py").is_file():
        for file in sorted(path.rglob("*.py")):
            yield from _bad_syntax(field, file)
        return
    if path.suffix == ".py" and path.is_file():
        yield from _bad_syntax(field, path)
        return
    kinds = "a Python file (.py) or a folder with __init__.py" if may_be_package else "a Python file (.py)"
    what = "does not exist" if not path.exists() else f"is not {kinds}"
    yield _fault(field, f"{path} {what}.", f"Give {kinds}.")


def _bad_syntax(field: str, file: Path) -> Iterator[Finding]:
    try:
        ast.parse(file.read_bytes(), str(file))
    except SyntaxError as exc:
        at = f"{file}:{exc.lineno}" if exc.lineno else str(file)
        yield _fault(field, f"{at}: {exc.msg}.", "Correct it; nothing that cannot be parsed is packaged.")


def _files_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """A module, or what a package's folder holds, by path below the folder around it."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        below = file.relative_to(path.parent)
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in below.parts):
            yield below.as_posix(), file.read_bytes()


def _import_name(requirement: str) -> str:
    """The module that a requirement most often brings; empty for what is no requirement."""
    try:
        return canonicalize_name(Requirement(requirement).name).replace("-", "_")
    except InvalidRequirement:
        return ""


def _fault(path: str, reason: str, fix: str) -> Finding:
    return Finding(path=path, rule="script-package", reason=reason, fix=fix)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
