"""`penstock checkpoints`: what it prints, what it changes, and with which code it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from compiled import ROOT
from made_checkpoints import FIRST, SECOND, fixture_root, own, save, write_object, write_objects
from penstock_pipelines.cli import main
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.contract.export import ExportManifest

DATASET = ROOT / "tests/distributed/formats/format-1/dataset"


@pytest.fixture
def root(tmp_path: Path) -> CheckpointRoot:
    """Steps 10 and 20 whole, 30 without a manifest."""
    root = CheckpointRoot((tmp_path / "checkpoints").as_uri())
    save(root, 10)
    save(root, 20, attempt=SECOND, token=2, config={"seed": 8, "model": {"dim": 32, "options": {}}})
    write_objects(root, 30, FIRST)
    return root


def checkpoints(*arguments: str, settings: Path = ROOT / "penstock.toml") -> Result:
    return CliRunner().invoke(
        main, ["--settings", str(settings), "checkpoints", *arguments], catch_exceptions=False
    )


def path_of(root: CheckpointRoot) -> Path:
    return Path(root.uri.removeprefix("file://"))


def damage(root: CheckpointRoot, step: int, *, keep_time: bool = False) -> Path:
    """Flip a bit of an object."""
    entry = root.manifest(step).objects[0]
    path = path_of(root) / f"step-{step:08d}" / entry.name
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(entry.generation, entry.generation))
    return path


def make_old(root: CheckpointRoot, step: int) -> None:
    then = time.time() - 36 * 3600
    for path in (path_of(root) / f"step-{step:08d}").rglob("*"):
        os.utime(path, (then, then))


def rows(result: Result) -> dict[str, list[str]]:
    """Cells of each line by the first of them."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def test_list_tells_each_step_and_the_total(root: CheckpointRoot) -> None:
    result = checkpoints("list", str(path_of(root)))
    assert result.exit_code == 0
    told = rows(result)
    assert told["10"] == ["2026-11-21 22:26:40", "5.49 kB", "120", "3,840", "zero2 x 2", FIRST, "whole"]
    assert told["20"][-2:] == [SECOND, "whole"]
    assert told["30"][-1] == "not committed"
    assert result.output.splitlines()[-1] == f"{root.uri}: 2 whole, 1 not committed; 11 kB"


def test_list_names_what_is_damaged_and_how(root: CheckpointRoot) -> None:
    damage(root, 20)
    result = checkpoints("list", root.uri)
    assert (result.exit_code, rows(result)["20"][-1]) == (0, "damaged")
    assert (
        f"step 20: {root.uri}/step-00000020/{SECOND}/0-0.distcp is not the object that was" in result.output
    )


def test_list_for_programs(root: CheckpointRoot) -> None:
    told = json.loads(checkpoints("list", root.uri, "--json").output)
    assert [(each["step"], each["state"], each["bytes"]) for each in told] == [
        (30, "not committed", None),
        (20, "whole", root.manifest(20).size),
        (10, "whole", root.manifest(10).size),
    ]
    assert told[1]["uri"] == f"{root.uri}/step-00000020"


def test_show_tells_manifest_config_and_tensors(root: CheckpointRoot) -> None:
    output = checkpoints("show", root.uri, "--step", "10").output
    assert "written by   zero2 x 2, attempt aaaaaaaa, fencing token 1" in output
    assert "  model.dim = 32\n" in output
    assert "opt.state.weight.exp_avg  200 x 3  float32  2,400       2" in output
    assert "model: 1 tensors, 2.4 kB\nopt: 1 tensors, 2.4 kB" in output
    assert "step 20 of" in checkpoints("show", root.uri).output  # 30 has no manifest


def test_show_for_programs(root: CheckpointRoot) -> None:
    told = json.loads(checkpoints("show", root.uri, "--step", "10", "--json").output)
    assert Manifest.from_json(json.dumps(told["manifest"])) == root.manifest(10)
    assert told["tensors"][0] == {
        "name": "model.weight", "shape": [200, 3], "dtype": "float32", "bytes": 2400, "chunks": 2,
    }  # fmt: skip
    assert told["totals"]["opt"] == {"tensors": 1, "bytes": 2400}


def test_show_against_another_checkpoint_tells_only_what_differs(root: CheckpointRoot) -> None:
    told = json.loads(
        checkpoints("show", root.uri, "--step", "20", "--against", f"{root.uri}@10", "--json").output
    )
    assert told == {"config.seed": [8, 7]}
    output = checkpoints("show", root.uri, "--step", "20", "--against", f"{root.uri}@10").output
    assert re.search(r"config\.seed\s+8\s+7", output)
    assert "do not differ" in checkpoints("show", root.uri, "--against", root.uri).output


def test_verify_ends_with_0_for_what_was_written(root: CheckpointRoot) -> None:
    result = checkpoints("verify", root.uri, "--all")
    assert result.exit_code == 0
    size = f"{root.manifest(10).size:,}"
    assert f"ok  {root.uri}/step-00000010: 3 objects, {size} bytes read" in result.output
    assert f"{root.uri}/step-00000030: not committed, left out" in result.output


def test_verify_finds_a_flipped_bit_that_time_and_size_do_not_show(root: CheckpointRoot) -> None:
    path = damage(root, 20, keep_time=True)
    assert rows(checkpoints("list", root.uri))["20"][-1] == "whole"
    result = checkpoints("verify", root.uri)
    assert result.exit_code == 1
    assert f"BAD {path.as_uri()} has other bytes than were written: crc32c " in result.output
    assert ", sha256 " in result.output
    assert checkpoints("verify", root.uri, "--step", "10").exit_code == 0
    assert checkpoints("verify", root.uri, "--all").exit_code == 1


def test_verify_of_a_step_that_was_not_committed_is_a_finding(root: CheckpointRoot) -> None:
    result = checkpoints("verify", root.uri, "--step", "30")
    assert result.exit_code == 1
    assert f"BAD {root.uri}/step-00000030/manifest.json cannot be read" in result.output


def test_gc_deletes_only_when_told_and_only_leftovers(root: CheckpointRoot) -> None:
    make_old(root, 30)
    make_old(root, 20)
    own(root, "cccccccc", 3)
    before = sorted(path_of(root).rglob("*"))
    dry = checkpoints("gc", root.uri)
    assert (dry.exit_code, sorted(path_of(root).rglob("*"))) == (0, before)
    assert f"garbage  step-00000030/{FIRST}/0-0.distcp  2.4 kB  36.0 h old" in dry.output
    assert dry.output.splitlines()[-1].endswith("3 to delete, 5.49 kB; 0 kept; delete with --delete")
    done = checkpoints("gc", root.uri, "--delete")
    assert done.output.splitlines()[-1].endswith("deleted 3, 5.49 kB; 0 kept")
    assert root.steps() == [20, 10]
    assert "step-00000030" not in " ".join(map(str, path_of(root).rglob("*")))
    assert checkpoints("gc", root.uri).output == f"{root.uri}: nothing is left over\n"


def test_gc_says_what_it_keeps_and_why(root: CheckpointRoot) -> None:
    write_object(root, 20, "notes.txt", b"mine")
    own(root, FIRST, 3)
    output = checkpoints("gc", root.uri, "--older-than", "0").output
    assert (
        "kept     step-00000030: 3 objects, 5.49 kB: attempt aaaaaaaa owns the root and may be running"
        in output
    )
    assert "kept     step-00000020: 1 object, 4 B: it is not of the checkpoint layout" in output
    assert "3 to delete" in checkpoints("gc", root.uri, "--older-than", "0", "--finished").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{root}/step-00000010"], "is the directory of one step. Give its parent, {uri}, and --step 10."),
        (["list", "{root}/.."], "There are some below "),
        (["list", "{root}/nothing"], "there are no checkpoints below {uri}/nothing"),
        (["list", "s3://bucket/checkpoints"], "is not a storage URI: give gs://BUCKET/NAME or file:///PATH"),
        (["show", "{root}", "--step", "12"], "there is no step 12 below {uri}; the nearest is 10. There are: 10, 20, 30."),
        (["verify", "{root}", "--step", "29"], "the nearest is 30"),
        (["show", "{root}", "--step", "30"], "is no checkpoint: it has no manifest"),
        (["verify", "{root}", "--step", "10", "--all"], "give --step or --all, not both"),
        (["export", "{root}", "--step", "12", "--to", "there"], "the nearest is 10"),
        (["gc", "{root}", "--older-than", "-1"], "-1"),
    ],
)  # fmt: skip
def test_input_that_is_wrong_is_told_and_ends_with_2(
    root: CheckpointRoot, arguments: list[str], message: str
) -> None:
    result = checkpoints(*(argument.format(root=path_of(root)) for argument in arguments))
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert message.format(uri=root.uri) in result.output


def test_a_name_that_is_no_path_is_a_run_and_needs_settings(tmp_path: Path) -> None:
    result = checkpoints("list", "no-such-run", settings=tmp_path / "none.toml")
    assert result.exit_code == 2
    assert "there is no path 'no-such-run', and for a run of that id the settings are needed" in result.output


def test_a_directory_of_a_scripts_checkpoints_is_told_from_a_root(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    assert "copy of a script's checkpoint directory" in checkpoints("list", str(tmp_path)).output


@pytest.mark.parametrize("strategy", ["fsdp-full", "zero1"])
def test_a_checkpoint_of_a_real_run_passes_verification(tmp_path: Path, strategy: str) -> None:
    root = fixture_root(tmp_path, strategy)
    assert checkpoints("verify", root.uri).exit_code == 0


def test_an_export_is_made_by_a_process_of_its_own(tmp_path: Path) -> None:
    root = fixture_root(tmp_path, "zero1")
    model, data = tmp_path / "model", DATASET
    command = [
        sys.executable,
        "-m",
        "penstock_pipelines.cli",
        "checkpoints",
        "export",
        root.uri,
        "--step",
        "3",
    ]
    done = subprocess.run(
        [*command, "--to", str(model), "--data", str(data)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"exported step 3 of {root.uri} to {model.as_uri()}\n")
    assert ExportManifest.from_json((model / "manifest.json").read_bytes()).step == 3


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    root = fixture_root(tmp_path, "zero1")
    damage(root, 3, keep_time=True)
    result = checkpoints("export", root.uri, "--to", str(tmp_path / "model"))
    assert result.exit_code == 1
    assert "the checkpoint is damaged: " in result.output
