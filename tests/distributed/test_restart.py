"""Ranks that are started again in place: real launchers on loopback, real ranks, real gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.contract.checkpoint import Manifest, Owner, manifest_uri, owner_uri
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.contract.script_checkpoint import ScriptManifest, node_uri, script_manifest_uri
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import ChildProcess, RankRun, cluster_environs, reserved_port, run_cluster

TIMEOUT_SECONDS = 120.0


@pytest.fixture
def root_uri(tmp_path: Path) -> str:
    return (tmp_path / "checkpoints").as_uri()


def trainer(root_uri: str, *args: str) -> list[str]:
    """The launcher of ranks that report as our trainer does."""
    return [sys.executable, "-m", "distributed.quick_launch", f"--checkpoint.uri={root_uri}", *args]


def script(*options: str, processes_per_node: int = 1) -> list[str]:
    """The launcher of somebody's script."""
    return [
        *(sys.executable, "-m", "penstock_trainer", "launch", f"--processes-per-node={processes_per_node}"),
        *(*options, "--", sys.executable, "-m", "distributed.launch_ranks"),
    ]


def run_nodes(command: Sequence[str], body: str, *, open_ports: Sequence[int] = ()) -> list[RankRun]:
    return run_cluster(
        [command] * 2,
        open_ports=open_ports,
        env={"LAUNCH_RANKS": body},
        timeout_seconds=TIMEOUT_SECONDS,
    )


def rounds_told(stdout: str) -> list[dict[str, Any]]:
    """What the ranks of a node were told in each round, in the order of rounds."""
    return [json.loads(text) for text in re.findall(r"round (\{.*\})", stdout)]


def restarts(node: RankRun) -> list[str]:
    return re.findall(r"restart \d+ of \d+: .*", node.stderr)


def test_after_a_killed_rank_all_ranks_go_on_in_an_attempt_of_their_own(root_uri: str) -> None:
    nodes = run_nodes(trainer(root_uri), "kill_rank_1_once")

    assert [node.returncode for node in nodes] == [0, 0], nodes
    owner = Owner.from_json(FileStorage().read(owner_uri(root_uri)))
    for node in nodes:
        first, second = rounds_told(node.stdout)
        assert (first["PENSTOCK_RESTART"], first["PENSTOCK_FENCING_TOKEN"]) == ("0", "1")
        assert (second["PENSTOCK_RESTART"], second["PENSTOCK_FENCING_TOKEN"]) == ("1", "2")
        assert first["PENSTOCK_ATTEMPT"] != second["PENSTOCK_ATTEMPT"] == owner.attempt
        assert first["sum"] == second["sum"] == 3.0
        # The first cause is named once, and not what rank 0 saw of it.
        assert restarts(node) == [
            "restart 1 of 3: rank 1 was lost or lost its peers: died by signal 9 (Killed)"
        ]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("script_killed_once", "rank 1 was lost or lost its peers: died by signal 9 (Killed)"),
        ("script_exits_once", "rank 1 failed: exit code 3"),
    ],
)
def test_a_script_is_started_again_on_another_port_after_any_bad_end(body: str, cause: str) -> None:
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        nodes = run_nodes(script(), body, open_ports=[port])

    assert [node.returncode for node in nodes] == [0, 0], nodes
    told = [rounds_told(node.stdout) for node in nodes]
    for first, second in told:
        assert first["MASTER_PORT"] == str(port)
        assert [first["TORCHELASTIC_RESTART_COUNT"], second["TORCHELASTIC_RESTART_COUNT"]] == ["0", "1"]
        assert second["TORCHELASTIC_USE_AGENT_STORE"] is None
        assert second["sum"] == 3.0
    # All nodes agree on the port, and it is not the first round's.
    assert len({second["MASTER_PORT"] for _, second in told} - {str(port)}) == 1
    assert [restarts(node) for node in nodes] == [[f"restart 1 of 3: {cause}"]] * 2


def test_rounds_use_the_open_ports_one_after_another() -> None:
    with reserved_port("127.0.0.1") as one, reserved_port("127.0.0.1") as two:
        ports = [held.getsockname()[1] for held in (one, two)]
        nodes = run_nodes(script("--max-restarts=1"), "script_exits_always", open_ports=ports)

    assert [[told["MASTER_PORT"] for told in rounds_told(node.stdout)] for node in nodes] == [
        [str(port) for port in ports]
    ] * 2
    # A script's own exit code stays a failure when no restart is left.
    assert [node.returncode for node in nodes] == [1, 1]


def test_a_machine_alone_restarts_too() -> None:
    command = script(processes_per_node=2)
    with ChildProcess(command, {"LAUNCH_RANKS": "script_killed_once", "GLOO_SOCKET_IFNAME": "lo"}) as node:
        assert node.wait(TIMEOUT_SECONDS) == 0, node.stderr
        told = rounds_told(node.stdout)
        assert len({rank["MASTER_PORT"] for rank in told}) == 2
        assert sorted(rank["PENSTOCK_RESTART"] for rank in told) == ["0", "0", "1", "1"]


def test_a_rank_that_dies_in_every_round_ends_the_job_when_no_restart_is_left(root_uri: str) -> None:
    nodes = run_nodes(trainer(root_uri, "--max_restarts=2"), "kill_rank_1")

    assert [node.returncode for node in nodes] == [134, 134]
    cause = "rank 1 was lost or lost its peers: died by signal 9 (Killed)"
    for node in nodes:
        assert restarts(node) == [f"restart 1 of 2: {cause}", f"restart 2 of 2: {cause}"]
        assert f"exit code 134: {cause}" in node.stderr
    assert Owner.from_json(FileStorage().read(owner_uri(root_uri))).fencing_token == 3


@pytest.mark.parametrize(
    ("body", "cause"),
    [("raise_on_rank_1", "the loss is nan"), ("exit_on_rank_1", "exit code 3 without a report")],
)
def test_a_failure_of_the_trainers_own_is_final(root_uri: str, body: str, cause: str) -> None:
    nodes = run_nodes(trainer(root_uri), body)

    assert [node.returncode for node in nodes] == [1, 1]
    assert [restarts(node) for node in nodes] == [[], []]
    assert all(cause in node.stderr for node in nodes)


def test_a_job_that_was_replaced_does_not_take_its_checkpoints_back(root_uri: str) -> None:
    nodes = run_nodes(trainer(root_uri), "replaced_and_killed")

    assert [node.returncode for node in nodes] == [1, 1]
    assert [restarts(node) for node in nodes] == [[], []]
    assert "no restart in place" in nodes[1].stderr
    assert "died by signal 9" in nodes[1].stderr
    assert Owner.from_json(FileStorage().read(owner_uri(root_uri))).fencing_token == 2


def test_ranks_that_end_by_sigterm_are_not_started_again() -> None:
    """Neither their signal nor the broken connections of the other node's ranks count as a loss to mend."""
    environs = cluster_environs(2)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(ChildProcess(script(), {**environ, "LAUNCH_RANKS": "script_waits"}))
            for environ in environs
        ]
        for node in nodes:
            wait_for("round", node)
        nodes[1].send_signal(signal.SIGTERM)
        assert [node.wait(TIMEOUT_SECONDS) for node in nodes] == [134, 134], nodes[0].stderr
        for node in nodes:
            assert "died by signal 15" in node.stderr
            assert not re.search(r"restart \d of", node.stderr)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_script_goes_on_from_its_checkpoint_directory(tmp_path: Path, max_restarts: int) -> None:
    """In place from the directory itself; on machines that are new from its copy in storage."""
    uri = (tmp_path / "bucket").as_uri()

    def job(machines: str) -> list[RankRun]:
        directories = [tmp_path / f"{machines}-{node}/checkpoints" for node in range(2)]
        options = [f"--max-restarts={max_restarts}", f"--checkpoint-uri={uri}"]
        return run_cluster(
            [[*script(*options, f"--checkpoint-dir={path}"), str(path)] for path in directories],
            env={"LAUNCH_RANKS": "script_counts"},
            timeout_seconds=TIMEOUT_SECONDS,
        )

    nodes = job("old")
    told = [re.findall(r"begins at (\d)", node.stdout) for node in nodes]
    if max_restarts == 0:
        assert [node.returncode for node in nodes] == [134, 134], nodes
        assert told == [["0"], ["0"]]
        nodes = job("new")
        told = [re.findall(r"begins at (\d)", node.stdout) for node in nodes]
        assert told == [["3"], ["3"]]
    else:
        assert told == [["0", "3"], ["0", "3"]]
    assert [node.returncode for node in nodes] == [0, 0], nodes
    for node in range(2):
        text = FileStorage().read(script_manifest_uri(node_uri(uri, node)))
        assert [file.name for file in ScriptManifest.from_json(text).files] == [
            f"state.{step}" for step in range(1, 7)
        ]


def test_a_job_whose_last_checkpoint_was_not_saved_is_not_done(tmp_path: Path) -> None:
    bucket, directory = tmp_path / "bucket", tmp_path / "checkpoints"
    # The script itself takes the bucket away, as a permission that is withdrawn would.
    program = f"rm -r {bucket} && touch {bucket} && echo 1 > {directory}/state"
    command = [
        *(sys.executable, "-m", "penstock_trainer", "launch", f"--checkpoint-dir={directory}"),
        *(f"--checkpoint-uri={bucket.as_uri()}", "--", "sh", "-c", program),
    ]
    with ChildProcess(command, {}) as node:
        assert node.wait(TIMEOUT_SECONDS) == 134, node.stderr
        assert "all ranks are done, but a checkpoint was not saved" in node.stderr


def test_losses_of_a_trainer_that_was_killed_are_those_of_one_that_was_not(tmp_path: Path) -> None:
    config = tiny_config(build_dataset(tmp_path / "dataset"), steps=150)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=20))
    undisturbed = train(config, tmp_path / "undisturbed", kill_at_step=None)
    killed = train(config, tmp_path / "killed", kill_at_step=25)

    expected = {event.step: event.loss for event in undisturbed}
    assert sorted(expected) == list(range(1, 151))
    # Steps after the last checkpoint are measured twice, and each time alike, bit by bit.
    assert [event.loss for event in killed] == [expected[event.step] for event in killed]
    assert {event.step for event in killed} == expected.keys()
    steps = [event.step for event in killed]
    [resumed] = [here for before, here in pairwise(steps) if here != before + 1]
    assert resumed % 20 == 1
    assert resumed > 1

    root_uri = (tmp_path / "killed/checkpoints").as_uri()
    owner = Owner.from_json(FileStorage().read(owner_uri(root_uri)))
    manifest = Manifest.from_json(FileStorage().read(manifest_uri(root_uri, config.steps)))
    exported = ExportManifest.from_json((tmp_path / "killed/model/manifest.json").read_text())
    assert owner.fencing_token == manifest.fencing_token == 2
    assert exported.attempt == manifest.attempt == owner.attempt


def train(config: JobConfig, directory: Path, *, kill_at_step: int | None) -> list[Any]:
    """All steps that rank 0 logged in two nodes' run, whose rank 1 is killed after a step."""
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    uris = {
        "AIP_CHECKPOINT_DIR": (directory / "checkpoints").as_uri(),
        "AIP_MODEL_DIR": (directory / "model").as_uri(),
    }
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(ChildProcess(command, {**environ, **uris})) for environ in cluster_environs(2)
        ]
        if kill_at_step is not None:
            wait_for(f'"step": ?{kill_at_step},', nodes[0])
            [rank_1] = children(nodes[1].pid)
            os.kill(rank_1, signal.SIGKILL)
        assert [node.wait(TIMEOUT_SECONDS) for node in nodes] == [0, 0], nodes[0].stderr
        return step_events(nodes[0].stdout)


def wait_for(pattern: str, process: ChildProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not re.search(pattern, process.stdout):
        assert time.monotonic() < deadline, process.stderr
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
