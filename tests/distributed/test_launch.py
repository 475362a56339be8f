"""The launcher with real processes: one launcher per node on loopback, real ranks, real gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import ChildProcess, cluster_environs, run_cluster

TIMEOUT_SECONDS = 90.0


@pytest.fixture
def root_uri(tmp_path: Path) -> str:
    return (tmp_path / "checkpoints").as_uri()


def launcher(root_uri: str, *, processes_per_node: int = 1) -> list[str]:
    return [
        *(sys.executable, "-m", "distributed.quick_launch"),
        *(f"--checkpoint.uri={root_uri}", f"--processes_per_node={processes_per_node}"),
    ]


def ranks(name: str) -> dict[str, str]:
    return {"LAUNCH_RANKS": name}


def waiting_pids(process: ChildProcess, *, count: int) -> list[int]:
    """Process ids that the ranks (and their helpers) printed, once `count` ranks have."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(found := re.findall(r"waiting (\d+) (\d+)", process.stdout)) < count:
        assert time.monotonic() < deadline, process.stderr
        time.sleep(0.05)
    return [int(pid) for pair in found for pid in pair]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5.0  # the kernel's own time to deliver and to reap
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ranks_count_processes_of_pools_0_and_1_whatever_vertex_says(root_uri: str) -> None:
    command = launcher(root_uri, processes_per_node=2)
    nodes = run_cluster([command] * 2, reducers=2, env=ranks("reduce"), timeout_seconds=TIMEOUT_SECONDS)

    assert [node.returncode for node in nodes] == [0, 0], nodes
    seen = [json.loads(text) for node in nodes for text in re.findall(r"seen (\{.*\})", node.stdout)]
    seen.sort(key=lambda rank: int(rank["RANK"]))
    owner = Owner.from_json(FileStorage().read(owner_uri(root_uri)))
    for rank, told in enumerate(seen):
        assert told == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "PENSTOCK_ATTEMPT": owner.attempt,
            "PENSTOCK_FENCING_TOKEN": "1",
            "sum": 10.0,
        }
    assert len(seen) == 4
    assert "[rank 3] seen" in nodes[1].stdout
    assert "[rank 0]" not in nodes[0].stdout


def test_two_jobs_share_a_port_on_addresses_of_their_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs = []
        for name in ("one", "two"):
            [environ] = cluster_environs(1)
            command = launcher((tmp_path / name).as_uri())
            jobs.append(stack.enter_context(ChildProcess(command, {**environ, **ranks("reduce")})))
        assert [job.wait(TIMEOUT_SECONDS) for job in jobs] == [0, 0], [job.stderr for job in jobs]
        assert all('"sum": 1.0' in job.stdout for job in jobs)


@pytest.mark.parametrize(
    ("body", "exit_code", "cause"),
    [
        ("raise_on_rank_1", 1, "rank 1 failed at step 3: the loss is nan\nTraceback"),
        ("kill_rank_1", 134, "rank 1 was lost or lost its peers: died by signal 9"),
        ("exit_on_rank_1", 1, "rank 1 failed: exit code 3 without a report"),
    ],
)
def test_the_first_cause_on_any_node_is_every_nodes_exit_code(
    root_uri: str, body: str, exit_code: int, cause: str
) -> None:
    command = [*launcher(root_uri), "--max_restarts=0"]
    nodes = run_cluster([command] * 2, env=ranks(body), timeout_seconds=TIMEOUT_SECONDS)

    assert [node.returncode for node in nodes] == [exit_code, exit_code], nodes
    for node in nodes:
        assert f"exit code {exit_code}: {cause}" in node.stderr
        assert "collective failed" not in node.stderr.partition("exit code")[2]


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_node_is_waited_for(root_uri: str, late: int) -> None:
    environs = [{**environ, **ranks("quick")} for environ in cluster_environs(2)]
    with ChildProcess(launcher(root_uri), environs[1 - late]) as early:
        time.sleep(3.0)
        with ChildProcess(launcher(root_uri), environs[late]) as later:
            codes = [later.wait(TIMEOUT_SECONDS), early.wait(TIMEOUT_SECONDS)]
            assert codes == [0, 0], early.stderr + later.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wish_to_stop_reaches_every_rank_and_saved_state_is_retryable(root_uri: str, number: int) -> None:
    with ChildProcess(launcher(root_uri, processes_per_node=2), ranks("save_on_sigterm")) as node:
        pids = waiting_pids(node, count=2)
        node.send_signal(number)
        assert node.wait(TIMEOUT_SECONDS) == 134
        assert "was preempted at step 7" in node.stderr
        assert_gone(pids)


def test_a_second_wish_to_stop_changes_nothing(root_uri: str) -> None:
    with ChildProcess(launcher(root_uri), ranks("save_until_the_second_sigterm")) as node:
        waiting_pids(node, count=1)
        node.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while "saving" not in node.stdout:
            assert time.monotonic() < deadline, node.stderr
            time.sleep(0.05)
        node.send_signal(signal.SIGTERM)
        assert node.wait(TIMEOUT_SECONDS) == 134
        assert "was preempted at step 7" in node.stderr


def test_a_wish_to_stop_finds_ranks_that_have_only_just_been_started(root_uri: str) -> None:
    """They have nothing to save and no handler yet: the signal ends them, and nobody starts them again."""
    with ChildProcess(launcher(root_uri, processes_per_node=2), ranks("reduce")) as node:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while "started ranks" not in node.stderr:
            assert time.monotonic() < deadline, node.stderr
            time.sleep(0.01)
        node.send_signal(signal.SIGTERM)
        assert node.wait(TIMEOUT_SECONDS) == 134
        assert "died by signal 15" in node.stderr
        assert "restart 1 of" not in node.stderr
        assert "seen" not in node.stdout


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(root_uri: str) -> None:
    with ChildProcess(launcher(root_uri), ranks("ignore_sigterm")) as node:
        pids = waiting_pids(node, count=1)
        told_at = time.monotonic()
        node.send_signal(signal.SIGTERM)
        assert node.wait(TIMEOUT_SECONDS) == 134
        assert time.monotonic() - told_at >= 3.0
        assert_gone(pids)


def test_a_signal_before_the_nodes_have_met_ends_the_launcher_at_once(root_uri: str) -> None:
    environ = cluster_environs(2)[1]
    with ChildProcess(launcher(root_uri), {**environ, **ranks("quick")}) as worker:
        time.sleep(2.5)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(10.0) == 134
        assert "SIGTERM before all nodes had joined" in worker.stderr


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher_takes_its_ranks_along_and_ends_the_job_elsewhere(
    root_uri: str, killed: int
) -> None:
    environs = cluster_environs(2)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(ChildProcess(launcher(root_uri), {**environ, **ranks("ignore_sigterm")}))
            for environ in environs
        ]
        # The helper of a rank dies with the rank's group, which only a living launcher can see to.
        rank_pids = [waiting_pids(node, count=1)[0] for node in nodes]
        nodes[killed].send_signal(signal.SIGKILL)
        assert nodes[1 - killed].wait(TIMEOUT_SECONDS) == 134, nodes[1 - killed].stderr
        assert "restart 1 of" not in nodes[1 - killed].stderr  # not without the node
        assert_gone(rank_pids)
        for pid in waiting_pids(nodes[killed], count=1)[1:]:
            os.kill(pid, signal.SIGKILL)


def test_a_script_with_stock_initialisation_runs_on_two_nodes(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "distributed.launch_ranks"]
    command = [sys.executable, "-m", "penstock_trainer", "launch", "--processes-per-node=1", "--", *script]
    nodes = run_cluster([command] * 2, env=ranks("script"), timeout_seconds=TIMEOUT_SECONDS)

    assert [node.returncode for node in nodes] == [0, 0], nodes
    assert nodes[0].stdout == "sum 3.0 local 0\n"
    assert nodes[1].stdout == "[rank 1] sum 3.0 local 0\n"
