"""Source distributions (PEP 517, setuptools): the same files, name and requirements give the same bytes."""

from __future__ import annotations

import glob
import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

VERSION = "1"
# 40.8 is the first that has the back end; the metadata are in setup.cfg because `[project]` needs 61.
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=40.8"]
build-backend = "setuptools.build_meta"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDistribution:
    """What a distribution holds. Its version is always the same: what differs between two is told by their hashes."""

    name: str
    """Of the distribution, normalised as in PEP 503: lower case, words joined by `-`."""
    files: Mapping[str, bytes]
    """By path below a directory of PYTHONPATH: `train.py`, `helpers/__init__.py`, `helpers/words.txt`. Each directory at
    the top is a package, and so is each below it that has an `__init__.py`; other files are data of the package around."""
    requirements: tuple[str, ...]
    python: tuple[int, int] | None = None
    """Lowest version that it runs on; None: not known."""

    @property
    def stem(self) -> str:
        """`NAME-VERSION` as in PEP 625: the name of the file, without `.tar.gz`, and of the folder in it."""
        return f"{self.name.replace('-', '_')}-{VERSION}"

    def archive(self) -> bytes:
        """The .tar.gz. Bytes differ between machines only where their zlib compresses differently."""
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, data in sorted(self._members().items()):
                member = tarfile.TarInfo(
                    f"{self.stem}/{path}"
                )  # time, owner and mode at their constant defaults
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return gzip.compress(tar.getvalue(), mtime=0)

    def _members(self) -> dict[str, bytes]:
        meta = {"PKG-INFO": self._pkg_info(), "pyproject.toml": _PYPROJECT, "setup.cfg": self._setup_cfg()}
        sources = {f"src/{path}": data for path, data in self.files.items()}
        return {**sources, **{path: text.encode() for path, text in meta.items()}}

    def _pkg_info(self) -> str:
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {VERSION}"]
        if self.python:
            lines.append("Requires-Python: >={}.{}".format(*self.python))
        return "\n".join([*lines, *(f"Requires-Dist: {text}" for text in self.requirements), ""])

    def _setup_cfg(self) -> str:
        options = {
            "package_dir": ["= src"],
            "packages": sorted(self._packages()),
            "py_modules": sorted(path.removesuffix(".py") for path in self.files if "/" not in path),
            "install_requires": self.requirements,
            "python_requires": [">={}.{}".format(*self.python)] if self.python else [],
        }
        data: dict[str, list[str]] = {}
        for package, path in self._data():
            data.setdefault(package, []).append(glob.escape(path))
        lines = ["[metadata]", f"name = {self.name}", f"version = {VERSION}", "[options]", *_lists(options)]
        return "\n".join([*lines, "[options.package_data]", *_lists(data), ""])

    def _packages(self) -> set[str]:
        nested = [PurePosixPath(path) for path in self.files if "/" in path]
        top = {path.parts[0] for path in nested}
        return top | {".".join(path.parent.parts) for path in nested if path.name == "__init__.py"}

    def _data(self) -> Iterator[tuple[str, str]]:
        """(Package, path below it) of each file that is not one of its modules."""
        packages = self._packages()
        for path in map(PurePosixPath, sorted(self.files)):
            package = next((parent for parent in path.parents if ".".join(parent.parts) in packages), None)
            if package is not None and not (path.suffix == ".py" and path.parent == package):
                yield ".".join(package.parts), path.relative_to(package).as_posix()


def _lists(values: Mapping[str, Sequence[str]]) -> list[str]:
    """Settings of several lines, without the empty ones."""
    return ["\n    ".join([f"{name} =", *lines]) for name, lines in values.items() if lines]
