"""The modules of penstock_trainer that `python -m penstock_trainer launch` needs, as files to be carried elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import penstock_trainer

MODULE = "penstock_trainer"
"""What is run: `python -m penstock_trainer launch -- COMMAND`."""
REQUIREMENTS = ("google-crc32c>=1.5",)
"""What those modules import beside the standard library and the torch that the image has."""
STORAGE_REQUIREMENTS = ("google-cloud-storage>=3.4",)
"""What they import besides when a checkpoint directory is copied to Cloud Storage."""
PYTHON = (3, 10)
"""The lowest version that runs them."""

# The second is no import: ranks.py starts it by its path.
_ROOTS = (f"{MODULE}.__main__", f"{MODULE}.die_with_parent")


def launcher_files() -> Mapping[str, bytes]:
    """Sources by their path below a directory of PYTHONPATH: what the launcher imports, and what that imports."""
    top = Path(penstock_trainer.__path__[0]).parent
    found: dict[str, bytes] = {}
    waiting = list(_ROOTS)
    while waiting:
        file = _file_of(top, waiting.pop())
        if file is None or (path := file.relative_to(top).as_posix()) in found:
            continue
        found[path] = file.read_bytes()
        waiting += _imports(found[path])
    return {path: found[path] for path in sorted(found)}


def _file_of(top: Path, module: str) -> Path | None:
    """None for a name that is no module, as `x` in `from package.module import x`."""
    base = top.joinpath(*module.split("."))
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


def _imports(source: bytes) -> Iterator[str]:
    """Modules of the trainer that a source imports, wherever it does, and the packages that they are in."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == MODULE:
                yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
