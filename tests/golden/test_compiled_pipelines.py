"""What we send is kept in golden files, read as a diff when it changes: `python tests/golden/regenerate.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent
RECIPES = ["tiny-zero2", "tiny-fsdp"]


def compile_in(directory: Path, recipe: str, output: Path, *, hash_seed: str) -> bytes:
    """Compile with the installed command, as a user does."""
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "penstock_pipelines.cli", "--settings", str(ROOT / "penstock.toml")]
    subprocess.run(
        [*command, "compile", recipe, "-o", str(output)], cwd=directory, env=environment, check=True
    )
    return output.read_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_compiled_recipe_is_the_golden_one(recipe: str, tmp_path: Path) -> None:
    compiled = compile_in(ROOT, recipe, tmp_path / "pipeline.yaml", hash_seed="0")
    assert compiled.decode() == (GOLDEN / f"{recipe}.yaml").read_text(), (
        "run: python tests/golden/regenerate.py"
    )


def test_neither_directory_nor_hash_seed_changes_a_byte(tmp_path: Path) -> None:
    elsewhere = tmp_path / "a directory elsewhere"
    elsewhere.mkdir()
    compiled = compile_in(elsewhere, "tiny-zero2", tmp_path / "one.yaml", hash_seed="1")
    assert compiled == (GOLDEN / "tiny-zero2.yaml").read_bytes()


def test_a_copy_of_the_sources_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for package in ("components", "pipelines", "trainer_image"):
        shutil.copytree(ROOT / package, clone / package, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(clone / package) for package in ("components", "pipelines", "trainer_image")]
    program = (
        f"import sys; sys.path[:0] = {paths!r}\n"
        "import penstock_pipelines.cli as cli\n"
        f"assert cli.__file__.startswith({str(clone)!r}), cli.__file__\n"
        "cli.main()\n"
    )
    output = tmp_path / "clone.yaml"
    arguments = ["--settings", str(ROOT / "penstock.toml"), "compile", "tiny-zero2", "-o", str(output)]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    assert output.read_bytes() == (GOLDEN / "tiny-zero2.yaml").read_bytes()
