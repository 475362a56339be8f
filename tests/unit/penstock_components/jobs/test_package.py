"""A script as a source distribution: what is in it, that pip takes it, and what is refused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from penstock_components.jobs import launcher_modules
from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import EnvVar, PythonPackageSpec
from penstock_components.jobs.package import Launch, Package, package_script, upload
from penstock_components.jobs.source_distribution import SourceDistribution
from penstock_trainer.storage import storage_for

IMAGE = "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-9.py312:latest"
SCRIPT = """
import json, sys
from helpers import words
from helpers.deep import more
import one
print(json.dumps([__name__, sys.argv[1:], words(), more.WORD, one.ONE]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a script, a module and a package with data that the script uses."""
    folder = tmp_path / "source"
    deep = folder / "helpers" / "deep"
    deep.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "one.py").write_text("ONE = 1\n")
    (folder / "helpers" / "__init__.py").write_text(
        "from importlib.resources import files\n"
        "def words():\n    return (files(__package__) / 'data' / 'a [list].txt').read_text()\n"
    )
    (deep / "__init__.py").touch()
    (deep / "more.py").write_text("WORD = 'deep'\n")
    (folder / "helpers" / "data").mkdir()
    (folder / "helpers" / "data" / "a [list].txt").write_text("words")
    (folder / "helpers" / ".hidden").write_text("x")
    (deep / "__pycache__").mkdir()
    (deep / "__pycache__" / "more.cpython-311.pyc").write_bytes(b"x")
    return folder


def make(source: Path, **settings: Any) -> Package:
    extra = [source / "one.py", source / "helpers"]
    defaults = {"extra_modules": extra, "output_dir": source.parent / "out"}
    return package_script(source / "train.py", **{**defaults, **settings})


def members(package: Package) -> dict[str, bytes]:
    """Files of the archive below its folder, which is named as the file is."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(package.path.read_bytes())) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            assert member.name.startswith(f"{package.path.name.removesuffix('.tar.gz')}/")
            found[member.name.partition("/")[2]] = file.read()
    return found


def refusals(*args: Any, **settings: Any) -> list[str]:
    with pytest.raises(JobSpecError) as caught:
        package_script(*args, **settings)
    return [f"{finding.path}: {finding.reason}" for finding in caught.value.findings]


def test_the_same_input_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    first = make(source, requirements=["b>=1", "a"])
    for file in source.rglob("*"):
        os.utime(file, (1, 1))
    (source / "train.py").chmod(0o755)
    second = make(source, requirements=["a", "b>=1"], output_dir=tmp_path / "elsewhere")
    assert first.sha256 == second.sha256
    assert first.path.read_bytes() == second.path.read_bytes()
    assert make(source, requirements=["a"]).sha256 != first.sha256
    (source / "one.py").write_text("ONE = 2\n")
    assert make(source, requirements=["a", "b>=1"]).sha256 != first.sha256


def test_pip_installs_it_and_the_module_runs_with_its_modules_and_data(source: Path, tmp_path: Path) -> None:
    package = make(source, requirements=["torch>=2", "numpy; python_version < '3'"])
    target = tmp_path / "target"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package.path)], check=True)

    [installed] = metadata.distributions(path=[str(target)])
    assert (installed.name, installed.version) == ("penstock-script-train", "1")
    assert sorted(installed.requires or ()) == [
        "google-crc32c>=1.5", 'numpy; python_version < "3"', "torch>=2",
    ]  # fmt: skip
    assert installed.metadata["Requires-Python"] == ">={}.{}".format(*launcher_modules.PYTHON)

    command = [
        sys.executable,
        "-S",
        "-m",
        package.module,
        "--lr=1",
    ]  # -S: nothing else is there to be imported
    done = subprocess.run(
        command, env={"PYTHONPATH": str(target)}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == '["__main__", ["--lr=1"], "words", "deep", 1]\n'
    assert not list(target.rglob(".hidden"))


def test_the_carried_launcher_imports_only_what_it_requires(source: Path, tmp_path: Path) -> None:
    for path, data in members(make(source)).items():
        if path.startswith("src/penstock_trainer/"):
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    program = (
        "import sys; before = set(sys.modules); import penstock_trainer.__main__ as launcher; print(launcher.__file__);"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(tmp_path / "src")}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        str(tmp_path / "src" / "penstock_trainer" / "__main__.py"),
        "['google_crc32c', 'penstock_trainer']",
    ]


def test_it_carries_the_launcher_as_it_is_and_nothing_of_the_training_core(source: Path) -> None:
    held = members(make(source))
    carried = {path.removeprefix("src/") for path in held if path.startswith("src/penstock_trainer/")}
    root = Path(str(launcher_modules.penstock_trainer.__path__[0])).parent
    assert all(held[f"src/{path}"] == (root / path).read_bytes() for path in carried)
    assert "penstock_trainer/die_with_parent.py" in carried  # started by its path, imported by nobody
    assert (
        not {f"penstock_trainer/{name}.py" for name in ("trainer", "rank", "checkpoint", "export")} & carried
    )
    assert not {path for path in carried if "/engines/" in path or "/model/" in path}


def test_without_a_launch_nothing_of_ours_is_in_it(source: Path) -> None:
    package = make(source, launch=None)
    assert not [path for path in members(package) if "penstock_trainer" in path]
    assert b"Requires" not in members(package)["PKG-INFO"]
    spec = package.to_spec("us-docker.pkg.dev/x/tf-cpu.2-14.py310", "gs://b/a.tar.gz", ["--lr=1"])
    assert (spec.python_module, spec.args) == ("train", ("--lr=1",))


def test_a_spec_starts_the_script_through_the_launcher(source: Path) -> None:
    launch = Launch(processes_per_node=8, max_restarts=0, checkpoint_dir="/tmp/ckpt")
    package = make(source, launch=launch)
    assert b"Requires-Dist: google-cloud-storage>=3.4" in members(package)["PKG-INFO"]
    assert package.to_spec(IMAGE, "gs://b/p/a.tar.gz", ["--lr=1"], {"B": "2", "A": "1"}) == PythonPackageSpec(
        executor_image_uri=IMAGE,
        package_uris=("gs://b/p/a.tar.gz",),
        python_module="penstock_trainer",
        args=(
            "launch", "--processes-per-node=8", "--max-restarts=0", "--checkpoint-dir=/tmp/ckpt",
            "--", "python3", "-m", "train", "--lr=1",
        ),
        env=(EnvVar(name="A", value="1"), EnvVar(name="B", value="2")),
    )  # fmt: skip
    assert make(source).to_spec(IMAGE, "gs://b/a.tar.gz").args == ("launch", "--", "python3", "-m", "train")


@pytest.mark.parametrize(
    ("image", "uri", "told"),
    [
        ("", "gs://b/a.tar.gz", "executor_image_uri: it is empty"),
        (IMAGE, "/home/me/a.tar.gz", "package_uris[0]: '/home/me/a.tar.gz'"),
        (IMAGE, "gs://b/a.zip", "package_uris[0]: 'gs://b/a.zip'"),
        ("us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-8.py37:latest", "gs://b/a.tar.gz", "has Python 3.7; the launcher"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_run_is_refused(source: Path, image: str, uri: str, told: str) -> None:
    with pytest.raises(JobSpecError) as caught:
        make(source).to_spec(image, uri)
    assert told in str(caught.value)


def test_upload_writes_a_package_once_under_its_hash(source: Path, tmp_path: Path) -> None:
    package = make(source)
    uri = upload(package, f"file://{tmp_path}/bucket/packages/")
    assert uri == f"file://{tmp_path}/bucket/packages/{package.sha256}/penstock_script_train-1.tar.gz"
    written = storage_for(uri).stat(uri)
    assert upload(package, f"file://{tmp_path}/bucket/packages") == uri
    assert storage_for(uri).stat(uri) == written  # same generation: not written again
    assert storage_for(uri).read(uri) == package.path.read_bytes()


def test_a_script_whose_file_name_is_no_module_is_packaged_under_the_name_given(source: Path) -> None:
    script = source / "train-model.py"
    script.write_text("pass\n")
    assert refusals(script, output_dir=source) == ["script: 'train-model' is no name of a module."]
    package = package_script(script, name="train_model", output_dir=source)
    assert package.module == "train_model"
    assert package.path.name == "penstock_script_train_model-1.tar.gz"
    assert b"src/train_model.py" in b"\n".join(path.encode() for path in members(package))


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("absent.py", None, "absent.py does not exist."),
        ("train.sh", "echo", "train.sh is not a Python file (.py)."),
        ("train.py", "x = 1\ndef f(:\n", "train.py:2: invalid syntax."),
        ("train.py", "x = '\0'", "source code string cannot contain null bytes"),
        ("train.py", b"x = '\xff'\n", "(unicode error) 'utf-8' codec can't decode byte 0xff"),
        ("class.py", "pass", "'class' is no name of a module."),
        ("json.py", "pass", "a module 'json' would hide that of the standard library"),
        ("penstock_trainer.py", "pass", "'penstock_trainer' is also the module of the launcher."),
        ("a_library.py", "pass", "'a_library' is also the module of 'A-Library>=2'."),
    ],
)
def test_a_script_that_cannot_be_packaged_is_refused(
    tmp_path: Path, file: str, text: str | bytes | None, told: str
) -> None:
    script = tmp_path / file
    if text is not None:
        script.write_bytes(text if isinstance(text, bytes) else text.encode())
    [refusal] = refusals(script, requirements=["A-Library>=2"], output_dir=tmp_path / "out")
    assert refusal.startswith("script: ")
    assert told in refusal
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "requirement", ["-r requirements.txt", "git+https://x/y", "torch>>2", "", "./wheels/x.whl"]
)
def test_what_is_no_requirement_is_refused(source: Path, requirement: str) -> None:
    [refusal] = refusals(source / "one.py", requirements=["a", requirement], output_dir=source)
    assert refusal.startswith(f"requirements[1]: {requirement!r} is no requirement: ")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("absent.py", ["does not exist"]),
        ("plain", ["plain is not a Python file (.py) or a folder with __init__.py"]),
        ("broken", ["more.py:1: "]),
        ("logging.py", ["'logging' would hide that of the standard library"]),
        ("script.py", ["'script' is also the module of"]),
    ],
)
def test_extra_modules_are_checked_as_the_script_is(source: Path, extra: str, told: Sequence[str]) -> None:
    (source / "plain").mkdir()
    (source / "broken").mkdir()
    (source / "broken" / "__init__.py").touch()
    (source / "broken" / "more.py").write_text("(")
    (source / "logging.py").touch()
    (source / "script.py").touch()
    found = refusals(source / "script.py", extra_modules=[source / extra], output_dir=source)
    assert all(part in refusal for part, refusal in zip(told, found, strict=True)), found
    assert all(refusal.startswith("extra_modules[0]: ") for refusal in found)


def test_a_module_beside_the_script_that_is_imported_and_not_given_is_refused(source: Path) -> None:
    found = refusals(source / "train.py", extra_modules=[source / "one.py"], output_dir=source)
    assert found == [
        f"extra_modules: {source}/train.py:3 imports 'helpers', which lies beside the script and would not be in "
        "the package."
    ]
    with pytest.raises(JobSpecError, match=rf"Add {source}/one.py to them"):
        package_script(source / "train.py", extra_modules=[source / "helpers"], output_dir=source)


def test_one_text_is_not_taken_for_a_list_of_its_letters(source: Path) -> None:
    (refusal,) = refusals(source / "one.py", requirements="torch", output_dir=source)
    assert refusal == "requirements: it is one text, 'torch'."
    with pytest.raises(JobSpecError, match=r"args=\['--lr=1'\]"):
        make(source).to_spec(IMAGE, "gs://b/a.tar.gz", "--lr=1")


def test_every_fault_is_told_at_once(source: Path) -> None:
    (source / "json.py").write_text("(")
    found = refusals(
        source / "json.py", requirements=["a b", "c d"], extra_modules=[source / "none"], output_dir=source
    )
    assert [refusal.partition(":")[0] for refusal in found] == [
        "requirements[0]", "requirements[1]", "script", "script", "extra_modules[0]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"processes_per_node": 0}, "processes_per_node is 0. Give 1 or more"),
        ({"max_restarts": -1}, "max_restarts is -1. Give 0 or more"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(settings: dict[str, int], told: str) -> None:
    with pytest.raises(JobSpecError, match=told):
        Launch(**settings)


def test_a_distribution_names_packages_modules_and_data_apart() -> None:
    files = {"a.py": b"", "p/__init__.py": b"", "p/q/__init__.py": b"", "p/q/x.json": b"", "p/r/s.py": b""}
    distribution = SourceDistribution(name="a-b", files=files, requirements=("c>=1",), python=(3, 9))
    with tarfile.open(fileobj=io.BytesIO(distribution.archive())) as archive:
        file = archive.extractfile("a_b-1/setup.cfg")
        assert file is not None
        told = file.read().decode()
    assert told == (
        "[metadata]\nname = a-b\nversion = 1\n[options]\npackage_dir =\n    = src\npackages =\n    p\n    p.q\n"
        "py_modules =\n    a\ninstall_requires =\n    c>=1\npython_requires =\n    >=3.9\n"
        "[options.package_data]\np.q =\n    x.json\np =\n    r/s.py\n"
    )
