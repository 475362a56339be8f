"""Real ranks of `python -m penstock_trainer.rank` that are killed, told to stop, and continued to the end."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.contract.config import Strategy
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import ChildProcess, reserved_port

STEPS = 150
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Attempt:
    """How two ranks ended."""

    returncodes: list[int]
    reports: list[dict[str, Any] | None]
    stdout: str
    stderr: str

    @property
    def losses(self) -> dict[int, float]:
        return {event.step: event.loss for event in step_events(self.stdout)}


@dataclass(frozen=True)
class Job:
    """A run of two ranks of a plain launcher; every attempt has the same arguments."""

    directory: Path
    data_uri: str
    strategy: Strategy

    def saved(self) -> int:
        """The newest step that is a checkpoint; 0 before there is one."""
        root = CheckpointRoot((self.directory / "checkpoints").as_uri())
        return next((manifest.step for manifest in root.whole_steps()), 0)

    def attempt(self, name: str, *, signals: Mapping[int, tuple[int, int]] | None = None) -> Attempt:
        """Run both ranks to their end; `signals[step]` = (rank, signal) is sent when rank 0 has logged the step."""
        config = tiny_config(
            self.data_uri,
            (self.directory / "checkpoints").as_uri(),
            strategy=self.strategy,
            steps=STEPS,
        )
        config = replace(config, checkpoint=replace(config.checkpoint, interval=20))
        with ExitStack() as stack:
            port = stack.enter_context(reserved_port("127.0.0.1")).getsockname()[1]
            results = [self.directory / f"{name}-{rank}.json" for rank in range(2)]
            ranks = [
                stack.enter_context(
                    ChildProcess(
                        [sys.executable, "-m", "penstock_trainer.rank", f"--config={config.to_json()}"],
                        {
                            "RANK": str(rank),
                            "WORLD_SIZE": "2",
                            "LOCAL_RANK": str(rank),
                            "LOCAL_WORLD_SIZE": "2",
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port),
                            "GLOO_SOCKET_IFNAME": "lo",
                            "OMP_NUM_THREADS": "1",
                            "PENSTOCK_RESULT_FILE": str(results[rank]),
                            "AIP_MODEL_DIR": (self.directory / "model").as_uri(),
                        },
                    )
                )
                for rank in range(2)
            ]
            for step, (rank, number) in sorted((signals or {}).items()):
                wait_for_step(ranks[0], step)
                ranks[rank].send_signal(number)
            returncodes = [rank.wait(TIMEOUT_SECONDS) for rank in ranks]
            reports = [json.loads(path.read_text()) if path.exists() else None for path in results]
            return Attempt(returncodes, reports, ranks[0].stdout, ranks[0].stderr)


def wait_for_step(rank: ChildProcess, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(event.step >= step for event in step_events(rank.stdout)):
        assert time.monotonic() < deadline, rank.stderr
        time.sleep(0.01)


@pytest.mark.parametrize("strategy", ["fsdp-full", "zero2"])
def test_a_killed_and_then_preempted_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, strategy: Strategy
) -> None:
    job = Job(tmp_path, build_dataset(tmp_path / "dataset"), strategy)

    killed = job.attempt("killed", signals={25: (1, signal.SIGKILL)})
    assert killed.returncodes == [134, -9], killed.stderr
    assert killed.reports[0] is not None
    assert killed.reports[0]["outcome"] == "retryable"
    assert killed.reports[0]["step"] >= 25
    assert killed.reports[1] is None
    resumed_at = job.saved()
    # What was being written when rank 1 was lost may be a checkpoint or not.
    assert resumed_at in (max(killed.losses) // 20 * 20, max(killed.losses) // 20 * 20 - 20)

    # One rank is told; both stop after the same step, and state is saved there.
    preempted = job.attempt("preempted", signals={resumed_at + 30: (1, signal.SIGTERM)})
    assert preempted.returncodes == [134, 134], preempted.stderr
    steps = [report["step"] for report in preempted.reports if report and report["outcome"] == "preempted"]
    assert len(steps) == 2
    assert steps[0] == steps[1] == max(preempted.losses) < STEPS
    assert min(preempted.losses) == resumed_at + 1

    finished = job.attempt("finished")
    assert finished.returncodes == [0, 0], finished.stderr
    assert [report and report["outcome"] for report in finished.reports] == ["done", "done"]
    assert min(finished.losses) == steps[0] + 1

    # What two attempts both measured, they measured alike, bit by bit.
    repeated = killed.losses.keys() & preempted.losses.keys()
    assert {step: killed.losses[step] for step in repeated} == {
        step: preempted.losses[step] for step in repeated
    }
    assert finished.losses[STEPS] < killed.losses[1] - 1.0

    # The export tells of the run that survived: every step once, and the values of its own attempts.
    lines = [json.loads(line) for line in (tmp_path / "model/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {
        line["step"]: line["loss"] for line in lines
    } == killed.losses | preempted.losses | finished.losses
    manifest = ExportManifest.from_json((tmp_path / "model/manifest.json").read_text())
    owner = Owner.from_json(FileStorage().read(owner_uri((tmp_path / "checkpoints").as_uri())))
    assert (manifest.step, manifest.world_size) == (STEPS, 2)
    assert (manifest.attempt, owner.fencing_token) == (owner.attempt, 3)


def test_a_mistake_in_the_config_is_reported_by_every_rank_and_is_not_retryable(tmp_path: Path) -> None:
    missing = (tmp_path / "nothing").as_uri()
    attempt = Job(tmp_path, missing, "fsdp-full").attempt("failed")

    assert attempt.returncodes == [1, 1]
    for report in attempt.reports:
        assert report is not None
        assert report["outcome"] == "failed"
        assert re.search(rf"{missing} is not a dataset: it has no manifest.json", report["error"])
        assert "Traceback" in report["traceback"]
