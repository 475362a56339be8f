"""A node that is cut off from the network: the primary gives up retryably, and the job continues as if nothing had been."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.contract.config import CheckpointConfig, EngineConfig
from rehearse.namespaces import refusal

HERE = Path(__file__).parent
INTERVAL, STEPS, PULLED_AT = 5, 40, 22
# With a namespace for processes too, nothing is left of a test that is interrupted.
NAMESPACES = ("unshare", "-rn", "--fork", "--pid", "--kill-child", "--mount-proc")


def missing() -> str:
    """Why two networks cannot be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "iproute2 (ip) is not installed"
    return refusal(*NAMESPACES[1:])


def losses(seen: Any) -> dict[int, str]:
    """Hex, by step, of rank 0's lines."""
    return {event.step: float(event.loss or 0).hex() for event in step_events(seen["output"][0])}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing()), reason=f"network namespaces: {missing()}")
def test_a_partition_ends_the_job_retryably_and_costs_no_sample(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = tiny_config(
        build_dataset(tmp_path / "data"),
        steps=STEPS,
        checkpoint=CheckpointConfig(interval=INTERVAL),
        engine=EngineConfig(strategy="fsdp-full", timeout_seconds=5),
        preflight=False,
    )
    config = replace(config, model=replace(config.model, dim=64, num_layers=4))
    program = [sys.executable, str(HERE / "two_networks.py"), str(tmp_path), config.to_json(), str(PULLED_AT)]
    done = subprocess.run([*NAMESPACES, *program], capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert seen["clean"]["codes"] == [0, 0], seen["clean"]["output"]
    # The other launcher waits for an answer of the primary's store, until the service ends it.
    assert seen["cut"]["codes"][0] == 134, seen["cut"]["output"]
    assert seen["again"]["codes"] == [0, 0], seen["again"]["output"]
    clean, before, after = losses(seen["clean"]), losses(seen["cut"]), losses(seen["again"])
    assert len(clean) == STEPS
    assert {**before, **after} == clean
    continued = re.search(r"continuing from step (\d+)", "\n".join(seen["again"]["output"]))
    assert continued
    assert min(after) == int(continued[1]) + 1 <= max(before) + 1
    print(f"a partition at step {PULLED_AT}: the primary had ended {seen['cut']['seconds']:.0f} s later")
