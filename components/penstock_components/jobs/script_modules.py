"""The modules that a packaged script consists of: what is wrong with them, and the files that they are."""

from __future__ import annotations

import ast
import keyword
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_components.jobs.findings import Finding

RULE = "script-package"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptModule:
    """The script, or something that it imports."""

    field: str
    """Where it was given: `script` or `extra_modules[0]`."""
    name: str
    """As it is imported."""
    path: Path
    is_script: bool = False

    @property
    def is_package(self) -> bool:
        """Whether it is a folder with `__init__.py`. A script is a file."""
        return not self.is_script and (self.path / "__init__.py").is_file()

    def files(self) -> Iterator[tuple[str, Path]]:
        """By path below a directory of PYTHONPATH: the module, or what the package's folder holds that is not hidden."""
        if not self.is_package:
            yield f"{self.name}.py", self.path
            return
        for file in sorted(self.path.rglob("*")):
            below = file.relative_to(self.path)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in below.parts)
            if file.is_file() and not hidden:
                yield (Path(self.name) / below).as_posix(), file


def check_modules(modules: Sequence[ScriptModule], taken: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is wrong with them, of which the first is the script; `taken` says whose names they may not have."""
    whose = dict(taken)
    imported: dict[str, str] = {}
    for module in modules:
        yield from _check_name(module, whose)
        whose.setdefault(module.name, str(module.path))
        if not module.is_package and not (module.path.suffix == ".py" and module.path.is_file()):
            yield _not_a_module(module)
            continue
        for file in (file for _, file in module.files() if file.suffix == ".py"):
            try:
                tree = ast.parse(file.read_bytes(), str(file))
            except SyntaxError as exc:
                at = f"{file}:{exc.lineno}" if exc.lineno else str(file)
                yield _fault(
                    module.field, f"{at}: {exc.msg}.", "Correct it; what cannot be parsed is not packaged."
                )
            else:
                for name, line in _imports(tree):
                    imported.setdefault(name, f"{file}:{line}")
    yield from _left_behind(modules, imported)


def _check_name(module: ScriptModule, taken: Mapping[str, str]) -> Iterator[Finding]:
    name = module.name
    if not name.isidentifier() or keyword.iskeyword(name):
        fix = "Give name=, in letters, digits and underscores." if module.is_script else "Rename it."
        yield _fault(module.field, f"{name!r} is no name of a module.", fix)
    elif name in sys.stdlib_module_names:
        reason = f"a module {name!r} would hide that of the standard library from everything that imports it."
        yield _fault(module.field, reason, "Give it another name.")
    elif name in taken:
        yield _fault(module.field, f"{name!r} is also the module of {taken[name]}.", "Give one another name.")


def _not_a_module(module: ScriptModule) -> Finding:
    kinds = "a Python file (.py)" if module.is_script else "a Python file (.py) or a folder with __init__.py"
    what = f"is not {kinds}" if module.path.exists() else "does not exist"
    return _fault(module.field, f"{module.path} {what}.", f"Give {kinds}.")


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Top-level names of absolute imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def _left_behind(modules: Sequence[ScriptModule], imported: Mapping[str, str]) -> Iterator[Finding]:
    """What lies beside the script, where Python finds it on this machine, and would be missing in the job."""
    packaged = {module.name for module in modules} | sys.stdlib_module_names
    folder = modules[0].path.parent
    for name, at in imported.items():
        beside = [file for file in (folder / f"{name}.py", folder / name / "__init__.py") if file.is_file()]
        if beside and name not in packaged:
            path = beside[0] if beside[0].stem == name else beside[0].parent
            reason = f"{at} imports {name!r}, which lies beside the script and would not be in the package."
            yield _fault("extra_modules", reason, f"Add {path} to them.")


def _fault(path: str, reason: str, fix: str) -> Finding:
    return Finding(path=path, rule=RULE, reason=reason, fix=fix)
