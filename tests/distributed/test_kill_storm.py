"""Whichever rank is killed, and whenever: the run ends with the losses of the run that was left alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from distributed.storm_ranks import Storm
from distributed.test_foreign_scripts import ON_CPU, SCRIPT, plain_weights
from distributed.test_restart import children, wait_for
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import ChildProcess, cluster_environs

pytestmark = pytest.mark.full

TIMEOUT_SECONDS = 150.0
STEPS, INTERVAL = 60, 10
RANKS_PER_NODE = 2
WORLD_SIZE = 2 * RANKS_PER_NODE
STRATEGIES: tuple[Strategy, ...] = ("fsdp-full", "zero2")
SAVE = "step-00000020"
PUBLISH = ["os.link", "os.rename"]
"""What makes an object visible, see FileStorage."""


@dataclass(frozen=True)
class Moment:
    """When a rank is killed, by the events of rank 0 or of its writer; and what is a checkpoint then."""

    events: list[tuple[list[str], str]]
    if_primary: int
    """The newest step that is one when the victim is rank 0, whose writer ends with it."""
    otherwise: Collection[int]
    """What it may be when rank 0 lives on: its writer goes on, and commits if the victim's part is written."""


MOMENTS: Mapping[str, Moment] = {
    "right before a save": Moment([(["os.mkdir"], SAVE)], 10, {10, 20}),
    "during a save": Moment([(PUBLISH, f"{SAVE}/")], 10, {10, 20}),
    "right before a save counts": Moment([(PUBLISH, f"{SAVE}/manifest.json")], 10, {20}),
    "right after a save": Moment([(PUBLISH, f"{SAVE}/manifest.json"), (["os.remove"], f"{SAVE}/")], 20, {20}),
    "during the export": Moment([(PUBLISH, "model/config.json")], STEPS, {STEPS}),
    "right before the export counts": Moment([(PUBLISH, "model/manifest.json")], STEPS, {STEPS}),
}


class Clean:
    """A run that is left alone, and what others are held against."""

    def __init__(self, directory: Path, strategy: Strategy) -> None:
        config = tiny_config(build_dataset(directory / "dataset"), strategy=strategy, steps=STEPS)
        self.config: JobConfig = replace(
            config,
            checkpoint=replace(config.checkpoint, interval=INTERVAL),
            processes_per_node=RANKS_PER_NODE,
            max_restarts=5,
        )
        with Nodes(our_trainer(self.config), job_uris(directory / "clean")) as nodes:
            found = nodes.finished()
        self.losses = {event.step: event.loss for event in found}
        assert [event.step for event in found] == list(range(1, STEPS + 1))

    def require_equal(self, found: Sequence[StepEvent]) -> None:
        """Every step, each time it was measured, has the clean run's loss, bit by bit."""
        assert {event.step for event in found} == self.losses.keys()
        assert [event.loss for event in found] == [self.losses[event.step] for event in found]


class Nodes(ExitStack):
    """Two launchers and their ranks."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__()
        self.launchers = [
            self.enter_context(ChildProcess(command, {**environ, **env})) for environ in cluster_environs(2)
        ]

    def finished(self) -> list[StepEvent]:
        """What rank 0 has logged over all rounds, when all nodes are done."""
        codes = [launcher.wait(TIMEOUT_SECONDS) for launcher in self.launchers]
        assert codes == [0, 0], self.launchers[0].stderr + self.launchers[1].stderr
        return step_events(self.launchers[0].stdout)

    def kill(self, rank: int) -> None:
        """The rank of the round that runs now."""
        launcher = self.launchers[rank // RANKS_PER_NODE]
        [pid] = [
            pid
            for pid in children(launcher.pid)
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        ]
        os.kill(pid, signal.SIGKILL)

    def restarts(self) -> list[str]:
        """The causes as every node has logged them."""
        [causes, others] = [
            re.findall(r"restart \d+ of \d+: ([^\"\n]*)", launcher.stderr) for launcher in self.launchers
        ]
        assert causes == others
        return causes


def our_trainer(config: JobConfig) -> list[str]:
    return [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]


def job_uris(directory: Path) -> dict[str, str]:
    return {
        "AIP_CHECKPOINT_DIR": (directory / "checkpoints").as_uri(),
        "AIP_MODEL_DIR": (directory / "model").as_uri(),
    }


def lost(rank: int) -> str:
    return f"rank {rank} was lost or lost its peers: died by signal 9 (Killed)"


def require_export_of_last_attempt(directory: Path) -> None:
    owner = Owner.from_json(FileStorage().read(owner_uri((directory / "checkpoints").as_uri())))
    manifest = ExportManifest.from_json((directory / "model/manifest.json").read_text())
    assert (manifest.attempt, manifest.step) == (owner.attempt, STEPS)


def wait_for_restart(launcher: ChildProcess) -> None:
    """Until it is about to start the ranks of another round, and none of any node is left."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "restart 1 of" not in launcher.stderr:
        assert time.monotonic() < deadline, launcher.stderr
        time.sleep(0.01)


def newest_checkpoint(directory: Path) -> int:
    """While no rank of the run lives. Whatever has a manifest then is whole, to its last byte."""
    root = CheckpointRoot((directory / "checkpoints").as_uri())
    committed = [step for step in root.steps() if root.state(step).condition != "not committed"]
    assert [finding for step in committed for finding in verify(root, step)] == []
    return committed[0]


@pytest.fixture(scope="module", params=STRATEGIES)
def clean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_killed_at_a_delicate_moment_changes_no_loss(
    clean: Clean, tmp_path: Path, moment: str
) -> None:
    when = MOMENTS[moment]
    victim = random.Random(f"{clean.config.engine.strategy} {moment}").randrange(WORLD_SIZE)
    storm = Storm(directory=str(tmp_path), victim=victim, moment=when.events)
    with Nodes(our_trainer(clean.config), {**job_uris(tmp_path), **storm.env}) as nodes:
        for launcher in nodes.launchers:
            wait_for_restart(launcher)
        newest = newest_checkpoint(tmp_path)
        storm.open_gate(1)
        found = nodes.finished()
        assert nodes.restarts() == [lost(victim)]
        assert f"continuing from step {newest} of" in nodes.launchers[0].stderr

    assert newest in ({when.if_primary} if victim == 0 else when.otherwise)
    clean.require_equal(found)
    steps = [event.step for event in found]
    went_back_to = [here for before, here in pairwise(steps) if here != before + 1]
    assert went_back_to in ([], [newest + 1])
    require_export_of_last_attempt(tmp_path)


def test_ranks_killed_again_and_again_change_no_loss(clean: Clean, tmp_path: Path) -> None:
    draw = random.Random(f"{clean.config.engine.strategy} storm")
    victims = [draw.randrange(WORLD_SIZE) for _ in range(3)]
    with Nodes(our_trainer(clean.config), job_uris(tmp_path)) as nodes:
        at = 1
        for victim in victims:
            wait_for(f'"step": ?{at},', nodes.launchers[0])
            nodes.kill(victim)
            # Beyond all that was logged until now, so that the next round is what logs it.
            at = max(event.step for event in step_events(nodes.launchers[0].stdout)) + draw.randint(2, 12)
        found = nodes.finished()
        assert nodes.restarts() == [lost(victim) for victim in victims]

    clean.require_equal(found)
    require_export_of_last_attempt(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_a_foreign_script_whose_rank_is_killed_finishes(tmp_path: Path, seed: int) -> None:
    draw, epochs = random.Random(seed), 100
    victim, at = draw.randrange(WORLD_SIZE), draw.randint(1, 400)
    command = [
        *(sys.executable, "-m", "penstock_trainer", "launch", f"--processes-per-node={RANKS_PER_NODE}"),
        *("--", "python", str(SCRIPT), "--output", str(tmp_path), "--epochs", str(epochs)),
    ]
    with Nodes(command, ON_CPU) as nodes:
        wait_for(rf"step {at}\n", nodes.launchers[0])
        nodes.kill(victim)
        nodes.finished()
        assert nodes.restarts() == [lost(victim)]

    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    assert {rank["steps"] for rank in told} == {16 * epochs}
    assert all(rank["weights"] == told[0]["weights"] for rank in told)
    assert told[0]["weights"] == pytest.approx(plain_weights(epochs), abs=1e-5)
