"""Nodes that come and go: real launchers, torchrun's real agents and real ranks on loopback."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import LOSS_TOLERANCE, step_events, tiny_config
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.testing import ChildProcess, cluster_environs, reserved_port, run_cluster

TIMEOUT_SECONDS = 90.0
STEPS = 1200  # half a minute, so that a node can come and go meanwhile


def launcher(*command: str, nodes: str = "1:1", max_restarts: int = 0) -> list[str]:
    return [sys.executable, "-m", "distributed.elastic_launch", nodes, str(max_restarts), *command]


def script(function: str) -> list[str]:
    return [sys.executable, "-m", "distributed.elastic_ranks", function]


def environs_of(num_nodes: int) -> list[dict[str, str]]:
    """torchrun's store listens on every address: a port that no other job of this machine has."""
    with reserved_port("127.0.0.1") as held:
        return cluster_environs(num_nodes, port=held.getsockname()[1])


def until(seen: Callable[[], object], *nodes: ChildProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not seen():
        assert time.monotonic() < deadline, [node.stdout[-2000:] + node.stderr[-4000:] for node in nodes]
        time.sleep(0.05)


def test_a_lost_rank_is_started_again_on_a_fresh_store(tmp_path: Path) -> None:
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
    command = launcher(*script("kill_rank_1_once"), str(tmp_path / "marker"), nodes="2:2", max_restarts=2)
    nodes = run_cluster([command] * 2, port=port, timeout_seconds=TIMEOUT_SECONDS)

    assert [node.returncode for node in nodes] == [0, 0], nodes
    for node in nodes:
        assert node.stdout.splitlines() == ["world 2"] * 3, node
        assert "exit code 0: all ranks of this node are done" in node.stderr


@pytest.mark.parametrize(
    ("function", "exit_code", "cause"),
    [
        ("killed", 134, "rank 0 died by signal 9 (Killed)"),
        pytest.param("exits_134", 134, "rank 0 ended with exit code 134", marks=pytest.mark.full),
        pytest.param("exits_3", 1, "rank 0 ended with exit code 3", marks=pytest.mark.full),
    ],
)
def test_the_exit_code_tells_what_this_nodes_ranks_tell(function: str, exit_code: int, cause: str) -> None:
    with ChildProcess(launcher(*script(function)), environs_of(1)[0]) as node:
        assert node.wait(TIMEOUT_SECONDS) == exit_code, node.stderr
        assert f"exit code {exit_code}: {cause}" in node.stderr


def test_sigterm_reaches_the_ranks_and_asks_for_another_try() -> None:
    with ChildProcess(launcher(*script("waits")), environs_of(1)[0]) as node:
        until(lambda: "waiting" in node.stdout, node)
        pid = int(node.stdout.split()[1])
        node.send_signal(signal.SIGTERM)
        assert node.wait(TIMEOUT_SECONDS) == 134, node.stderr
        until(lambda: not psutil.pid_exists(pid), node)


@pytest.mark.full
def test_ranks_end_with_an_agent_that_is_killed() -> None:
    with ChildProcess(launcher(*script("waits")), environs_of(1)[0]) as node:
        until(lambda: "waiting" in node.stdout, node)
        rank = psutil.Process(int(node.stdout.split()[1]))
        agent = rank.parent()
        assert agent is not None
        agent.kill()
        assert node.wait(TIMEOUT_SECONDS) == 134, node.stderr
        until(lambda: not rank.is_running(), node)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        (["--nodes=2:1"], 1, "--nodes=2:1 is not valid: it must be MIN:1 with MIN from 1 to 1"),
        (["--nodes=1"], 1, "--nodes=1 is not valid"),
        (["--nodes=1:1", "--checkpoint-dir=x"], 2, "cannot be had with --nodes, where nodes come and go"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(
    arguments: list[str], exit_code: int, told: str
) -> None:
    command = [sys.executable, "-m", "penstock_trainer", "launch", *arguments, "--", "python", "train.py"]
    with ChildProcess(command, {}) as node:
        assert node.wait(TIMEOUT_SECONDS) == exit_code
        assert told in node.stderr


@pytest.mark.full
@pytest.mark.timeout(600)  # two minutes on idle cores
def test_a_run_that_gains_and_loses_a_node_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    """One node alone, two when the second has come, and one again when its launcher, agent and rank are killed."""
    config = tiny_config(build_dataset(tmp_path / "dataset"), steps=STEPS)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=100))
    with ChildProcess(trainer(config, "1:1"), environs_of(1)[0] | uris(tmp_path / "clean")) as node:
        assert node.wait(3 * TIMEOUT_SECONDS) == 0, node.stderr
        expected = {event.step: event.loss for event in step_events(node.stdout)}
    assert sorted(expected) == list(range(1, STEPS + 1))

    environs = [environ | uris(tmp_path / "elastic") for environ in environs_of(2)]
    with ExitStack() as stack:
        first = stack.enter_context(ChildProcess(trainer(config, "1:2"), environs[0]))
        until(lambda: step_events(first.stdout), first)
        second = stack.enter_context(ChildProcess(trainer(config, "1:2"), environs[1]))
        until(lambda: world_sizes(first, second) == [1, 2], first, second)
        joined_at = last_step(first, second)
        until(lambda: last_step(first, second) >= joined_at + 10, first, second)
        kill_tree(second.pid)
        assert first.wait(3 * TIMEOUT_SECONDS) == 0, first.stderr
        told = step_events(first.stdout) + step_events(second.stdout)
        seen = world_sizes(first, second)

    assert seen == [1, 2, 1]
    assert {event.step for event in told} == expected.keys()
    for event in told:
        assert event.loss == pytest.approx(expected[event.step], abs=LOSS_TOLERANCE), event.step


def world_sizes(*nodes: ChildProcess) -> list[int]:
    """Those of the run, in order. Rank 0 tells them, and torchrun may put it on another node each time."""
    joins = [line for node in nodes for line in re.findall(r"(.+) world_size=(\d+)", node.stderr)]
    return [int(size) for size, _ in groupby(size for _, size in sorted(joins))]


def last_step(*nodes: ChildProcess) -> int:
    return max(event.step for node in nodes for event in step_events(node.stdout))


def trainer(config: JobConfig, nodes: str) -> list[str]:
    command = [sys.executable, "-m", "penstock_trainer.rank", f"--config={config.to_json()}"]
    return launcher(*command, nodes=nodes, max_restarts=3)


def uris(directory: Path) -> dict[str, str]:
    return {
        "AIP_CHECKPOINT_DIR": (directory / "checkpoints").as_uri(),
        "AIP_MODEL_DIR": (directory / "model").as_uri(),
    }


def kill_tree(pid: int) -> None:
    """A machine that vanishes: its launcher, agent and rank at once."""
    launcher_process = psutil.Process(pid)
    for process in [*launcher_process.children(recursive=True), launcher_process]:
        with suppress(ProcessLookupError):  # the rank may have ended with its agent
            os.kill(process.pid, signal.SIGKILL)
