"""Whatever is killed, at any instant of save, upload, commit and pruning: the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

import penstock_trainer.storage as penstock_storage
from distributed.storage_server import BUCKET, environment_of, storage_server
from distributed.storm_ranks import Process, Storm
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.checkpoint_root import (
    CheckpointRoot,
    find_leftovers,
    read_index,
    remove_leftovers,
    verify,
)
from penstock_trainer.checkpoints.writer import Writer
from penstock_trainer.contract.checkpoint import step_dir_uri
from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.storage import join
from penstock_trainer.testing import ChildProcess
from unit.penstock_trainer.checkpoints.one_buffer import Job, Watched, manifest_of, require_whole

TIMEOUT_SECONDS = 120.0
STEPS, INTERVAL, KEPT = 60, 2, 2
LAST_AIM = STEPS - 5 * INTERVAL
"""Some saves end undisturbed, so that what is left over at the end is known."""
KILLS_PER_RUN = 6
"""Times the runs of the full tests: 108 kills."""
STRATEGIES: tuple[Strategy, ...] = ("fsdp-full", "zero2")

Victim = tuple[str, int]
"""Role and rank."""
LAUNCHER: Victim = ("launcher", 0)
RANKS: list[Victim] = [("rank", 0), ("rank", 1)]
WRITERS: list[Victim] = [("writer", 0), ("writer", 1)]
# Writers more often than the others: their loss costs a fraction of a second and not a new start of all.
VICTIMS: list[list[Victim]] = [
    *([writer] for writer in WRITERS * 2),
    WRITERS,
    *([rank] for rank in RANKS),
    RANKS,
    [RANKS[0], WRITERS[1]],
    [RANKS[1], WRITERS[0]],
    [LAUNCHER],
    [LAUNCHER, *RANKS, *WRITERS],
]
Chunks = list[tuple[tuple[int, ...], bytes]]
"""Of a tensor: where each begins, and its bytes."""
Sight = Callable[[set[str], set[str]], bool]
"""Whether the objects of the root before and now differ in what is waited for."""

Found = TypeVar("Found")


def appears(end: str) -> Sight:
    return lambda before, now: any(name.endswith(end) for name in now - before)


def a_deletion(before: set[str], now: set[str]) -> bool:
    return any(name.endswith("/manifest.json") for name in before - now)


SIGHTS: list[Sight | None] = [
    *(appears(".distcp"), appears("/index.json"), appears("/manifest.json"), a_deletion),
    None,  # whatever is going on
]


@dataclass
class Round:
    """Ranks from their start to their end."""

    found: int
    """The newest checkpoint when it began; 0 for none."""
    attempt: str = ""
    was_disturbed: bool = False


class Storms(ExitStack):
    """A run whose processes are killed, and which is continued each time: in place, or by another launcher."""

    def __init__(self, config: JobConfig, directory: Path) -> None:
        super().__init__()
        directory.mkdir()
        self.root = CheckpointRoot(config.checkpoint.uri)
        self.storm = Storm(directory=str(directory))
        self.rounds: list[Round] = []
        self._command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
        self._launchers: list[ChildProcess] = []
        self._launch()

    def kill(self, victims: list[Victim], draw: random.Random) -> None:
        """At an instant that is drawn; back when the run goes on, or is about to."""
        self._wait(self._steps)
        found = self._wait(lambda: self._find(victims))
        with ExitStack() as stack:
            descriptors = [stack.enter_context(opened(process.pid)) for process in found]
            self._await_instant(draw)
            signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
            for descriptor in descriptors[1:]:
                with suppress(ProcessLookupError):  # gone with the first
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._wait(
            lambda: not {process.pid for process in found} & {one.pid for one in self.storm.processes()}
        )
        self.rounds[-1].was_disturbed = True
        assert self._steps()[-1] <= LAST_AIM, "the run is too short for so many kills"
        roles = {role for role, _ in victims}
        print(time.strftime("%X"), "killed", victims, "at step", self._steps()[-1], file=sys.stderr)
        if "launcher" in roles:
            self._launchers[-1].wait(TIMEOUT_SECONDS)
            self._launch()
        elif "rank" in roles:
            self._restarts += 1
            self._wait(lambda: f"restart {self._restarts} of" in self._launchers[-1].stderr)
            self._begin_round()
            self._logged_before = len(self._launchers[-1].stdout)
            self.storm.open_gate(self._restarts)

    def finished(self) -> list[StepEvent]:
        """What rank 0 has logged in all rounds, when the run is done."""
        code = self._launchers[-1].wait(TIMEOUT_SECONDS)
        assert code == 0, self._launchers[-1].stderr
        told = "".join(launcher.stderr for launcher in self._launchers)
        for each, attempt in zip(self.rounds, re.findall(r"attempt (\w+) owns", told), strict=True):
            each.attempt = attempt
        # No round has continued from anything but the newest checkpoint that it found.
        begun = re.findall(r"continuing from step (\d+) of|no checkpoint: beginning at step (0)", told)
        assert [int(some or none) for some, none in begun] == [each.found for each in self.rounds]
        return [event for launcher in self._launchers for event in step_events(launcher.stdout)]

    def _launch(self) -> None:
        """Once whatever is left of the launcher before has gone."""
        self._wait(lambda: not self.storm.processes())
        self._restarts = 0
        for gate in Path(self.storm.directory).glob("go-*"):
            gate.unlink()
        self._begin_round()
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **self.storm.env}
        self._launchers.append(self.enter_context(ChildProcess(self._command, env)))
        self._logged_before = 0

    def _begin_round(self) -> None:
        """While no rank lives. Whatever has a manifest now is whole, to its last byte."""
        committed = [step for step in self.root.steps() if self.root.state(step).condition != "not committed"]
        assert [finding for step in committed for finding in verify(self.root, step)] == []
        self.rounds.append(Round(found=max(committed, default=0)))

    def _steps(self) -> list[int]:
        """That this round has logged."""
        told = self._launchers[-1].stdout[self._logged_before :]
        return [int(step) for step in re.findall(r'"step": ?(\d+),', told)]

    def _find(self, victims: list[Victim]) -> list[Process]:
        """Empty while one of them is not there."""
        living = {(process.role, process.rank): process for process in self.storm.processes()}
        return [living[victim] for victim in victims] if set(victims) <= living.keys() else []

    def _await_instant(self, draw: random.Random) -> None:
        # A save during which a rank has lost three writers ends the run: two steps later it is over, or has lost two.
        at = self._steps()[-1] + draw.randint(2, 5)
        self._wait(lambda: self._steps()[-1] >= at)
        sight = draw.choice(SIGHTS)
        if sight is None:
            time.sleep(draw.uniform(0.0, 0.06))
            return
        before = self._objects()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not sight(before, now := self._objects()):
            assert time.monotonic() < deadline, self._launchers[-1].stderr
            before |= now
        time.sleep(draw.choice([0.0, draw.uniform(0.0, 0.005)]))

    def _objects(self) -> set[str]:
        return {info.uri for info in self.root.storage.list_objects(f"{self.root.uri}/step-")}

    def _wait(self, ask: Callable[[], Found]) -> Found:
        """For an answer that is neither False nor empty."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (answer := ask()):
            assert time.monotonic() < deadline, self._launchers[-1].stderr
            time.sleep(0.01)
        return answer


class Clean:
    """Runs that are left alone, one for each strategy, and what others are held against."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data_uri = build_dataset(directory / "dataset")
        self._found: dict[Strategy, tuple[Mapping[int, float | None], Mapping[str, Chunks]]] = {}

    def config(self, root_uri: str, strategy: Strategy) -> JobConfig:
        config = tiny_config(self._data_uri, root_uri, strategy=strategy, steps=STEPS)
        return replace(
            config,
            model=replace(config.model, dropout=0.1),
            checkpoint=replace(config.checkpoint, interval=INTERVAL, keep_last=KEPT),
            processes_per_node=2,
            max_restarts=100,
        )

    def require_equal(self, found: list[StepEvent], root: CheckpointRoot, strategy: Strategy) -> None:
        """Every step, each time it was measured, and the last step's state: bit by bit."""
        losses, state = self._of(strategy)
        assert {event.step for event in found} == losses.keys()
        assert [event.loss for event in found] == [losses[event.step] for event in found]
        assert tensors(root) == state

    def _of(self, strategy: Strategy) -> tuple[Mapping[int, float | None], Mapping[str, Chunks]]:
        if strategy not in self._found:
            directory = self._directory / strategy
            config = self.config((directory / "root").as_uri(), strategy)
            directory.mkdir()
            with Storms(config, directory / "run") as run:
                losses = {event.step: event.loss for event in run.finished()}
                assert list(losses) == list(range(1, STEPS + 1))
                self._found[strategy] = losses, tensors(run.root)
        return self._found[strategy]


def tensors(root: CheckpointRoot) -> Mapping[str, Chunks]:
    """Of the last step's checkpoint."""
    directory = step_dir_uri(root.uri, STEPS)
    return {
        tensor.name: sorted(
            (
                chunk.offsets,
                root.storage.read(
                    join(directory, chunk.object), start=chunk.byte_offset, length=chunk.length
                ),
            )
            for chunk in tensor.chunks
        )
        for tensor in read_index(root.storage, directory, root.whole(STEPS))
    }


def require_clean_root(root: CheckpointRoot, rounds: list[Round]) -> None:
    """Retention holds, and what else is there is of rounds that something was killed in, and goes with `gc`."""
    assert root.steps()[0] == STEPS
    committed = [step for step in root.steps() if root.state(step).condition != "not committed"]
    assert committed == [STEPS, STEPS - INTERVAL]
    leftovers = find_leftovers(root, min_age_seconds=0.0, is_finished=True)
    directories = {match[1] for one in leftovers if (match := re.search(r"step-\d+/(\w+)", one.uri))}
    assert directories <= {each.attempt for each in rounds if each.was_disturbed}
    assert {one.kept for one in leftovers} <= {""}
    remove_leftovers(root, leftovers)
    assert find_leftovers(root, min_age_seconds=0.0, is_finished=True) == []
    assert [finding for step in committed for finding in verify(root, step)] == []
    assert root.steps() == committed


@contextmanager
def opened(pid: int) -> Iterator[int]:
    """The process, and not whoever may get its number later."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def bucket(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of one of a running stand-in for Cloud Storage, to which the environment points Google's client."""
    with storage_server(directory) as endpoint:
        for name, value in environment_of(endpoint).items():
            monkeypatch.setenv(name, value)
        penstock_storage._storage_of.cache_clear()
        yield f"gs://{BUCKET}"
        penstock_storage._storage_of.cache_clear()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean"))


def require_unharmed(
    clean: Clean, directory: Path, root_uri: str, strategy: Strategy, *, kills: list[list[Victim]], seed: str
) -> None:
    draw = random.Random(seed)
    with Storms(clean.config(root_uri, strategy), directory / "run") as run:
        for victims in kills:
            run.kill(victims, draw)
        found = run.finished()
    clean.require_equal(found, run.root, strategy)
    require_clean_root(run.root, run.rounds)


def test_a_run_ends_as_if_nothing_of_it_had_been_killed(clean: Clean, tmp_path: Path) -> None:
    kills = [[WRITERS[0]], [RANKS[1], WRITERS[0]], [LAUNCHER]]
    uri = (tmp_path / "root").as_uri()
    require_unharmed(clean, tmp_path, uri, "fsdp-full", kills=kills, seed="three")


def test_a_commit_whose_answer_was_lost_with_its_writer_is_not_done_again(tmp_path: Path) -> None:
    """An index that is written anew is no longer the one that the manifest names, until the manifest is replaced too."""

    def refuse(operation: str, uri: str) -> None:
        assert operation not in ("write", "delete"), f"{operation} of {uri}"

    job = Job(tmp_path)
    receipt = job.write(8)
    job.commit(8, receipt)
    another = Writer(job.setup, memoryview(b""), Watched(refuse))
    another.commit(manifest_of(job.owner, 8), job.attempt, [receipt])
    require_whole(tmp_path, 8)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_ends_as_if_nothing_had_been_killed_wherever_it_was(
    clean: Clean, tmp_path: Path, strategy: Strategy, seed: int
) -> None:
    name = f"{strategy} {seed}"
    kills = random.Random(name).choices(VICTIMS, k=KILLS_PER_RUN)
    require_unharmed(clean, tmp_path, (tmp_path / "root").as_uri(), strategy, kills=kills, seed=name)


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_on_cloud_storage_ends_as_if_nothing_had_been_killed(
    clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    name = f"{strategy} gs"
    kills = random.Random(name).choices(VICTIMS, k=KILLS_PER_RUN)
    with bucket(tmp_path / "objects", monkeypatch) as uri:
        require_unharmed(clean, tmp_path, f"{uri}/root", strategy, kills=kills, seed=name)
