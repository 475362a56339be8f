"""SIGTERM while storage is slow: the run ends within its budget all the same, and with 134."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from contract.storage.misbehaving import misbehaving
from distributed.storage_server import BUCKET, environment_of, storage_server
from distributed.test_restart import wait_for
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.testing import ChildProcess, cluster_environs

BUDGET_SECONDS = 8.0
MARGIN_SECONDS = 5.0
"""For processes to end; between the default budget of 25 s and the 30 s of a Spot VM's notice."""
SLOW_SECONDS = 30.0


def test_a_save_that_does_not_fit_into_the_budget_is_left_out(tmp_path: Path) -> None:
    config = tiny_config(build_dataset(tmp_path / "dataset"), f"gs://{BUCKET}/root", steps=100_000)
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, interval=20, preemption_seconds=BUDGET_SECONDS),
        processes_per_node=2,
    )
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    with storage_server(tmp_path / "objects") as endpoint, misbehaving(endpoint) as slow:
        [cluster] = cluster_environs(1)
        with ChildProcess(command, {**cluster, **environment_of(slow.url)}) as job:
            wait_for('"step": ?30,', job)
            slow.spoil("slow", "PUT", times=0, seconds=SLOW_SECONDS)
            wait_for('"step": ?60,', job)  # of the saves after step 20 one is under way now
            job.send_signal(signal.SIGTERM)
            told_at = time.monotonic()
            assert job.wait(2 * BUDGET_SECONDS) == 134, job.stderr
            assert time.monotonic() - told_at < BUDGET_SECONDS + MARGIN_SECONDS
            log = job.stderr
    assert "the save under way did not end in time; the run will continue from the one before" in log
    assert "was preempted" in log
