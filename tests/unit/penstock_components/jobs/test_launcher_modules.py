"""What a package carries of the launcher has to run in Google's prebuilt images, which have an older Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from penstock_components.jobs.launcher_modules import PYTHON, launcher_files

NEW_IN_3_11 = {
    "typing": {
        "Self",
        "Never",
        "LiteralString",
        "Required",
        "NotRequired",
        "Unpack",
        "TypeVarTuple",
        "assert_never",
    },
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify", "member", "nonmember"},
    "asyncio": {"TaskGroup", "Runner", "timeout"},
    "contextlib": {"chdir"},
}
"""Names of the standard library (its documentation, "What's New In Python 3.11"); tomllib as a whole too."""


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported when the module runs; what stands under `if TYPE_CHECKING` does not."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.ImportFrom):
        yield from ((tree.module or "", alias.name) for alias in tree.names)
    if isinstance(tree, ast.Import):
        yield from ((alias.name, "") for alias in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child)


@pytest.mark.parametrize("path", launcher_files())
def test_the_launcher_needs_no_newer_python_than_it_says(path: str) -> None:
    tree = ast.parse(launcher_files()[path], feature_version=PYTHON)
    newer = [
        f"{module}.{name}"
        for module, name in imported(tree)
        if name in NEW_IN_3_11.get(module, ()) or module == "tomllib"
    ]
    assert newer == []
