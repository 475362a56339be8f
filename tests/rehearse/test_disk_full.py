"""A disk that fills up with checkpoints ends the job with its reason, and what was committed stays."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import CheckpointConfig
from rehearse.namespaces import refusal

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.skipif(bool(refusal("-rm")), reason=f"user namespaces: {refusal('-rm')}")
def test_a_full_disk_ends_the_job_with_its_reason_and_loses_nothing_committed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "data").mkdir()
    uri = build_dataset(tmp_path / "data")
    root = (disk / "root").as_uri()
    config = tiny_config(uri, root, steps=40, checkpoint=CheckpointConfig(uri=root, interval=5, keep_last=0))
    config = replace(config, model=replace(config.model, dim=64, num_layers=4))  # 1.6 MB a checkpoint
    program = [sys.executable, str(HERE / "small_disk.py"), str(disk), config.to_json()]
    done = subprocess.run(["unshare", "-rm", *program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert told["exit_code"] == 1, told["output"]
    assert re.search(r"exit code 1: .*No space left on device", told["output"]), told["output"]
    saved = {int(step) for step in re.findall(r"saved step (\d+) to", told["output"])}
    assert saved
    assert {int(step) for step, condition in told["conditions"].items() if condition == "whole"} == saved
