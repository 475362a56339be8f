"""What stands for a prebuilt image's own start: requirements are looked up where the module will run."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from penstock_local.jobs import package_start


def distribution(directory: Path, name: str, version: str, *requirements: str) -> None:
    """As pip leaves it behind."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_unmet_requirements_are_those_absent_or_of_another_version(directory: Path) -> None:
    here = metadata.version("pytest")
    distribution(directory, "beside", "2.0rc1")
    distribution(
        directory, "the-script", "1",
        "pytest>=1", "pytest<1", "nobody-has-this[extra]>=2", "beside>=2.0rc1",
        'other; python_version < "3"', 'optional; extra == "all"',
    )  # fmt: skip
    assert list(package_start.unmet(str(directory))) == [
        f"pytest<1 ({here} is there)", "nobody-has-this[extra]>=2",
    ]  # fmt: skip


def test_nothing_is_run_when_pip_fails(tmp_path: Path) -> None:
    (tmp_path / "package.tar.gz").write_bytes(b"no archive")
    arguments = [tmp_path / "installed", "platform", tmp_path / "package.tar.gz", "--"]
    done = subprocess.run(
        [sys.executable, package_start.__file__, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "pip could not install package.tar.gz"
