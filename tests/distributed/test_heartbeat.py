"""Ranks that live and do nothing, as their launchers find them: real processes, real gloo."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from distributed.heartbeat_ranks import HUNG_SECONDS
from distributed.test_restart import restarts, wait_for
from penstock_trainer.testing import ChildProcess, RankRun, cluster_environs, run_cluster

TIMEOUT_SECONDS = 90.0


def launcher(directory: Path, *options: str) -> list[str]:
    uri = (directory / "checkpoints").as_uri()
    return [
        *(sys.executable, "-m", "distributed.heartbeat_ranks", "launch"),
        *(f"--checkpoint.uri={uri}", *options),
    ]


def run_node(directory: Path, trouble: str, *options: str, troubled: int = 0) -> RankRun:
    env = {"TROUBLE": trouble, "TROUBLED": str(troubled)}
    [node] = run_cluster([launcher(directory, *options)], env=env, timeout_seconds=TIMEOUT_SECONDS)
    return node


def silences(node: RankRun) -> list[str]:
    return re.findall(r"hung: (rank .*)", node.stderr)


def test_a_stopped_rank_is_found_while_another_waits_for_it_and_the_job_goes_on(tmp_path: Path) -> None:
    node = run_node(tmp_path, "stop", "--processes_per_node=2", troubled=1)

    assert node.returncode == 0, node.stderr
    [restart] = restarts(node)
    assert re.fullmatch(
        r"restart 1 of 3: rank 1 hung: no sign of life for \d+ s in training step 3; its main thread is stopped",
        restart,
    )
    # Both are named where both were silent; the one that the other waits for comes first.
    assert re.match(r"rank 1: no sign of life .*; rank 0: no sign of life ", silences(node)[0])
    assert "all 2 ranks are done" in node.stderr


def test_without_restarts_a_hang_is_134_on_every_node_with_one_reason(tmp_path: Path) -> None:
    """Each launcher sees its own rank silent. Which of them is behind is told by all."""
    nodes = run_cluster(
        [launcher(tmp_path, "--max_restarts=0")] * 2,
        env={"TROUBLE": "load_without_end", "TROUBLED": "1"},
        timeout_seconds=TIMEOUT_SECONDS,
    )

    assert [node.returncode for node in nodes] == [134, 134], nodes
    cause = "exit code 134: rank 1 hung: no sign of life for"
    for node in nodes:
        assert re.search(cause + r" \d+ s in training step 3; its main thread is running", node.stderr)
    # The stack shows where.
    assert re.search(
        r"\[rank 1\]   File .*heartbeat_ranks.py\", line \d+ in load_without_end", nodes[1].stderr
    )


def test_a_rank_that_hangs_in_every_round_uses_up_the_restarts(tmp_path: Path) -> None:
    env = {"TROUBLE": "load_without_end", "TROUBLED": "0", "TROUBLE_ROUNDS": "2"}
    command = launcher(tmp_path, "--max_restarts=1")
    [node] = run_cluster([command], env=env, timeout_seconds=TIMEOUT_SECONDS)

    assert node.returncode == 134
    assert len(restarts(node)) == 1
    assert "exit code 134: rank 0 hung: no sign of life" in node.stderr


@pytest.mark.parametrize("trouble", ["be_slow", "save_for_long", "write_nonsense"])
def test_a_rank_is_left_alone_that(tmp_path: Path, trouble: str) -> None:
    node = run_node(tmp_path, trouble)
    assert node.returncode == 0, node.stderr
    assert restarts(node) == silences(node) == []


def test_a_script_may_be_silent_for_as_long_as_it_likes() -> None:
    command = [sys.executable, "-m", "distributed.heartbeat_ranks", "script"]
    program = f"""if [ -z "$PENSTOCK_HEARTBEAT_FILE" ]; then sleep {HUNG_SECONDS * 2}; else exit 1; fi"""
    [node] = run_cluster([[*command, "sh", "-c", program]], timeout_seconds=TIMEOUT_SECONDS)
    assert node.returncode == 0, node.stderr
    assert restarts(node) == []


def test_a_container_that_was_frozen_is_not_taken_for_hung(tmp_path: Path) -> None:
    """Its clock went on while nobody could beat and nobody could listen."""
    [environ] = cluster_environs(1)
    env = {**environ, "TROUBLE": "wait_to_be_stopped", "TROUBLED": "0"}
    with ChildProcess(launcher(tmp_path), env) as node:
        wait_for("pid", node)
        rank = int(node.stdout.split()[1])
        node.send_signal(signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(HUNG_SECONDS * 1.5)
        node.send_signal(signal.SIGCONT)  # and looks at its ranks before any of them runs
        time.sleep(0.3)
        os.kill(rank, signal.SIGCONT)
        assert node.wait(TIMEOUT_SECONDS) == 0, node.stderr
        assert "hung" not in node.stderr
