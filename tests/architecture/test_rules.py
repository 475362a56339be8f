"""Rules of the architecture that no linter knows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = ("components", "pipelines", "trainer_image")


def test_no_code_of_the_suite_asks_where_it_runs() -> None:
    asks = re.compile(r"\bif (not )?(is_)?local\b|\bif .*\bLOCAL_(MODE|RUN)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for part in SUITE
        for path in (ROOT / part).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock_pipelines.cli", ["kfp", "google.cloud.aiplatform", "rich", "torch"]),
        ("penstock_trainer.__main__", ["torch", "deepspeed"]),
        ("penstock_trainer.checkpoints.writer", ["torch", "numpy", "google.cloud.storage"]),
        ("penstock_trainer.checkpoint_root", ["torch", "numpy"]),
        ("penstock_trainer.contract.config", ["torch", "numpy", "google.protobuf"]),
        ("penstock_local.orchestrator.engine", ["kfp", "grpc", "google.cloud.aiplatform_v1"]),
    ],
)
def test_a_program_starts_without_what_its_verbs_need(module: str, absent: list[str]) -> None:
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_import_rule_names_every_module_that_components_must_not_see() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [rule] = [contract for contract in contracts if contract["name"].startswith("Of the trainer")]
    package = ROOT / "trainer_image" / "penstock_trainer"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    visible = {"__init__", "checkpoint_root", "contract", "storage"}
    assert set(rule["forbidden_modules"]) == {f"penstock_trainer.{name}" for name in modules - visible}


def test_the_contract_imports_nothing_but_the_standard_library() -> None:
    imports = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
    for path in (ROOT / "trainer_image" / "penstock_trainer" / "contract").glob("*.py"):
        for name in imports.findall(path.read_text()):
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names or name.startswith("penstock_trainer.contract"), (
                path.name,
                name,
            )


def test_make_help_lists_the_targets_of_the_readme() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("install", "run", "test", "check", "fix", "compile", "clean"):
        assert re.search(rf"^{target}\s", listed, re.MULTILINE), target


@pytest.mark.parametrize("part", ["components/penstock_components", "pipelines/penstock_pipelines"])
def test_every_module_can_be_imported_first(part: str) -> None:
    """A circle of imports shows only to whoever comes in at the wrong place."""
    top = ROOT / part
    names = [
        str(path.relative_to(top.parent).with_suffix("")).replace("/", ".") for path in top.rglob("*.py")
    ]
    program = f"""
import importlib, sys
for name in {sorted(names)!r}:
    for loaded in [module for module in sys.modules if module.startswith("penstock_")]:
        del sys.modules[loaded]
    importlib.import_module(name.removesuffix(".__init__"))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
