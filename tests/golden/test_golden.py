"""What we send is kept in golden files, read as a diff when it changes: `make golden`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.cloud import aiplatform_v1

from compiled import ROOT, compiled
from golden.normal_form import GOLDEN, documents, written
from penstock_components.jobs.check import check_text
from penstock_components.jobs.review import review

KEPT = documents()


def compile_in(directory: Path, recipe: str, output: Path, *, hash_seed: str) -> bytes:
    """Compile with the installed command, as a user does."""
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "penstock_pipelines.cli", "--settings", str(ROOT / "penstock.toml")]
    subprocess.run(
        [*command, "compile", recipe, "-o", str(output)], cwd=directory, env=environment, check=True
    )
    return output.read_bytes()


@pytest.mark.parametrize("name", KEPT)
def test_what_we_send_is_the_golden_file(name: str) -> None:
    text = (GOLDEN / name).read_text()
    changes = review(yaml.safe_load(text), KEPT[name])
    assert text == written(KEPT[name]), "run `make golden` if this is meant:\n" + "\n".join(changes)


def test_no_golden_file_is_left_over() -> None:
    found = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.yaml")}
    assert found == set(KEPT)


@pytest.mark.parametrize("name", KEPT)
def test_what_we_send_has_no_error(name: str) -> None:
    report = check_text((GOLDEN / name).read_text(), name=name)
    assert not report.has_errors, [finding.told() for finding in report.findings]


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("jobs/")])
def test_the_api_takes_our_jobs(name: str) -> None:
    aiplatform_v1.CustomJob.from_json(json.dumps(KEPT[name]))


def test_neither_directory_nor_hash_seed_changes_a_byte(tmp_path: Path) -> None:
    elsewhere = tmp_path / "a directory elsewhere"
    elsewhere.mkdir()
    made = compile_in(elsewhere, "tiny-zero2", tmp_path / "one.yaml", hash_seed="1")
    assert made == compiled("tiny-zero2").read_bytes()


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
    told = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True
    )
    assert output.read_bytes() == compiled("tiny-zero2").read_bytes()
    assert told.stdout.split()[0] == hashlib.sha256(output.read_bytes()).hexdigest()
