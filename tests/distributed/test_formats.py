"""Checkpoints of every format that was ever written are continued by today's code, bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.formats.make import SAVED, STEPS, STRATEGIES, config_of, run
from distributed.tiny_run import step_events
from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.contract.checkpoint import FORMAT_VERSION, OLDEST_FORMAT, Manifest
from penstock_trainer.contract.config import Strategy
from penstock_trainer.testing import ChildProcess, cluster_environs

STORED = sorted(Path(__file__).parent.glob("formats/format-*"))


def copied(stored: Path, strategy: Strategy, directory: Path) -> CheckpointRoot:
    """A root with the stored checkpoint. Its files get the times of when they were written, which are generations on disk."""
    root = directory / "root"
    shutil.copytree(stored / strategy, root)
    for path in root.rglob("manifest.json"):
        for entry in Manifest.from_json(path.read_text()).objects:
            os.utime(path.parent / entry.name, ns=(entry.generation, entry.generation))
    return CheckpointRoot(root.as_uri())


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_there_is_a_stored_checkpoint_of_every_format() -> None:
    versions = range(OLDEST_FORMAT, FORMAT_VERSION + 1)
    assert [path.name for path in STORED] == [f"format-{version}" for version in versions]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_a_stored_checkpoint_is_continued_with_the_losses_of_the_run_that_wrote_it(
    tmp_path: Path, stored: Path, strategy: Strategy
) -> None:
    root = copied(stored, strategy, tmp_path)
    assert root.manifest(SAVED).format_version == int(stored.name.removeprefix("format-"))
    assert verify(root, SAVED) == []

    losses = run(config_of(stored, strategy, root_uri=root.uri, steps=STEPS))

    assert [loss.hex() for loss in losses] == json.loads((stored / "losses.json").read_text())[strategy]
    assert root.manifest(STEPS).format_version == FORMAT_VERSION
    assert [manifest.step for manifest in root.whole_steps()] == [STEPS, SAVED]


def test_a_newer_format_ends_the_run_before_any_step_and_stays_as_it_is(tmp_path: Path) -> None:
    stored = STORED[-1]
    root = copied(stored, "fsdp-full", tmp_path)
    path = tmp_path / f"root/step-{SAVED:08d}/manifest.json"
    told = {
        **json.loads(path.read_text()),
        "format_version": FORMAT_VERSION + 1,
        "sharded_by": "something new",
    }
    path.write_text(json.dumps(told))
    before = files_below(tmp_path / f"root/step-{SAVED:08d}")

    config = replace(config_of(stored, "fsdp-full", root_uri=root.uri, steps=STEPS), processes_per_node=1)
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    with ChildProcess(command, cluster_environs(1)[0]) as node:
        assert node.wait(120.0) == 1, node.stderr
        assert step_events(node.stdout) == []
        assert f"checkpoint format {FORMAT_VERSION + 1} is not known here" in node.stderr
        assert "use a penstock that is at least as new as the one that wrote it" in node.stderr
    assert files_below(tmp_path / f"root/step-{SAVED:08d}") == before
