"""Saves on the nodes' own disks: a restart on the same nodes loses less than the root would, and changes no loss."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distributed.test_restart import children
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import LOSS_TOLERANCE, step_events, tiny_config
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.testing import ChildProcess, cluster_environs, run_ranks

TIMEOUT_SECONDS = 150.0
STEPS, INTERVAL, UPLOAD_EVERY = 170, 20, 3
KILLED_AFTER = 80
"""A save that is on the disk alone: the root has step 60, and gets 120 next."""


class Clean:
    """A run of two ranks that is left alone and has no local disk."""

    def __init__(self, directory: Path) -> None:
        config = tiny_config(build_dataset(directory / "dataset"), steps=STEPS)
        self.config = replace(config, processes_per_node=2, max_restarts=0)
        with launched(self.config, directory / "root") as node:
            assert node.wait(TIMEOUT_SECONDS) == 0, node.stderr
            events = step_events(node.stdout)
        assert [event.step for event in events] == list(range(1, STEPS + 1))
        self.losses = {event.step: event.loss for event in events}

    def with_disk(self, disk: Path, **more: Any) -> JobConfig:
        kept = replace(
            self.config.checkpoint,
            interval=INTERVAL,
            upload_every=UPLOAD_EVERY,
            keep_last=0,
            local_dir=str(disk),
        )
        return replace(self.config, checkpoint=kept, **more)

    def require_equal(self, found: list[StepEvent]) -> None:
        assert [event.loss for event in found] == [self.losses[event.step] for event in found]


@contextmanager
def launched(config: JobConfig, root: Path) -> Iterator[ChildProcess]:
    """One node's launcher."""
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    [environ] = cluster_environs(1)
    uris = {"AIP_CHECKPOINT_DIR": root.as_uri(), "AIP_MODEL_DIR": (root.parent / "model").as_uri()}
    with ChildProcess(command, {**environ, **uris}) as node:
        yield node


def kill_rank_1_after_local_save(node: ChildProcess) -> None:
    """Once step KILLED_AFTER is a checkpoint of the disk."""
    wait_for_log(rf"saved step {KILLED_AFTER} to \S+/disk/", node)
    [pid] = [
        pid for pid in children(node.pid) if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    ]
    os.kill(pid, signal.SIGKILL)


def wait_for_log(pattern: str, node: ChildProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not re.search(pattern, node.stderr):
        assert time.monotonic() < deadline, node.stderr
        time.sleep(0.01)


def continued_from(stderr: str) -> list[tuple[int, str]]:
    """(step, whence) of each time that a run continued."""
    found = re.findall(r"continuing from step (\d+) (?:of|on) (the nodes' own disks|\S+)", stderr)
    return [(int(step), whence) for step, whence in found]


def saved(root: Path) -> list[int]:
    return sorted(manifest.step for manifest in CheckpointRoot(root.as_uri()).whole_steps())


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean"))


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_local_save_and_no_loss_changes(
    clean: Clean, tmp_path: Path
) -> None:
    disk, root = tmp_path / "disk", tmp_path / "root"
    with launched(clean.with_disk(disk, max_restarts=3), root) as node:
        kill_rank_1_after_local_save(node)
        assert node.wait(TIMEOUT_SECONDS) == 0, node.stderr
        found, stderr = step_events(node.stdout), node.stderr

    # From a later save than was waited for, if one ended while the kill was on its way.
    [(resumed, whence)] = continued_from(stderr)
    assert whence == "the nodes' own disks"
    assert resumed >= KILLED_AFTER
    assert resumed % INTERVAL == 0
    steps = [event.step for event in found]
    went_back_to = [here for before, here in pairwise(steps) if here != before + 1]
    assert went_back_to in ([resumed + 1], [])
    assert set(steps) == clean.losses.keys()
    clean.require_equal(found)

    assert saved(root) == [60, 120, STEPS], "every third save, and the last"
    assert list(disk.iterdir()) == [], "the run is over: its last checkpoint is in the root"


@pytest.mark.full
@pytest.mark.parametrize("trouble", ["damaged", "another world size"])
def test_what_is_of_no_use_on_the_disk_is_passed_over_for_the_root(
    clean: Clean, tmp_path: Path, trouble: str
) -> None:
    disk, root = tmp_path / "disk", tmp_path / "root"
    config = clean.with_disk(disk)
    with launched(config, root) as node:
        kill_rank_1_after_local_save(node)
        assert node.wait(TIMEOUT_SECONDS) == 134, node.stderr
    [local] = disk.iterdir()
    newest = max(saved(local))
    assert newest >= KILLED_AFTER > max(saved(root)) == 60
    if trouble == "damaged":
        for path in local.glob("step-*/*/1-0.distcp"):
            path.write_bytes(b"")
    else:
        config = replace(config, processes_per_node=1)

    with launched(config, root) as node:
        assert node.wait(TIMEOUT_SECONDS) == 0, node.stderr
        found, stderr = step_events(node.stdout), node.stderr

    assert continued_from(stderr) == [(60, root.as_uri())]
    assert [event.step for event in found] == list(range(61, STEPS + 1))
    if trouble == "damaged":
        clean.require_equal(found)
        assert "1-0.distcp is not the object that was written" in stderr
    else:
        expected = {step: loss for step, loss in clean.losses.items() if step > 60}
        assert {event.step: event.loss for event in found} == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert saved(root) == [60, 120, STEPS]
    assert list(disk.iterdir()) == []


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks, which are nodes with disks of their own, has told of each of its runs."""
    bodies = ("each_on_its_own_disk", "damaged_on_one", "new_machine", "root_is_newer", "different_saves")
    directory = str(tmp_path_factory.mktemp("nodes"))
    arguments = [",".join((*bodies, "one_rank_cannot_store")), directory]
    ranks = run_ranks("distributed.checkpoint_ranks", arguments, world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    return [json.loads(rank.stdout) for rank in ranks]


def told(two_nodes: list[dict[str, Any]], body: str) -> list[Any]:
    return [node[body] for node in two_nodes]


def test_two_nodes_continue_from_their_own_disks_with_what_their_ranks_hold(
    two_nodes: list[dict[str, Any]],
) -> None:
    one, other = told(two_nodes, "each_on_its_own_disk")
    assert one["path"] != other["path"]
    # The two newest, and the last that went to the root, which a rank might still be sending.
    assert one["steps"] == other["steps"] == [4, 8, 12]
    assert one["restored"] == other["restored"] == [12, True]


def test_the_newest_save_that_is_whole_on_both_nodes_counts(two_nodes: list[dict[str, Any]]) -> None:
    assert told(two_nodes, "damaged_on_one") == [[8, True]] * 2


def test_with_a_new_machine_all_nodes_continue_from_the_root(two_nodes: list[dict[str, Any]]) -> None:
    assert told(two_nodes, "new_machine") == [[4, True]] * 2


def test_the_root_is_continued_from_when_disks_have_nothing_later(two_nodes: list[dict[str, Any]]) -> None:
    assert told(two_nodes, "root_is_newer") == [[8, True]] * 2


def test_saves_of_one_step_by_two_attempts_do_not_belong_together(two_nodes: list[dict[str, Any]]) -> None:
    assert told(two_nodes, "different_saves") == [[4, True]] * 2


def test_when_one_rank_cannot_store_its_part_both_end_with_its_reason(
    two_nodes: list[dict[str, Any]],
) -> None:
    for is_stored, error in told(two_nodes, "one_rank_cannot_store"):
        assert is_stored
        assert re.search(r"StorageError: .*step-00000008/\w+/1-0\.distcp", error)
