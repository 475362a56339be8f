"""From process start to the first optimizer step done: our rank alone, and a script that does nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.random_dataset import build_dataset
from benchmarks.rows import Machine, Row, compare
from penstock_trainer.contract.config import CheckpointConfig, DataConfig, JobConfig, ModelConfig, OptimConfig

TARGET = "<= 1.3"
_VOCAB_SIZE = 512
_SEQ_LEN = 32
_BATCH = 4


@dataclass(frozen=True, slots=True)
class Start:
    """Of one process, when its line of step 1 has come."""

    cpu_seconds: float
    """User and system time of all its threads, to the clock tick (usually 10 ms)."""
    wall_seconds: float


def start_rows(machine: Machine, directory: Path, *, times: int) -> list[Row]:
    """Both sides started in turns (ABBA), `times` each after one that fills the file cache."""
    data_uri = build_dataset(directory / "dataset", vocab_size=_VOCAB_SIZE, num_tokens=_BATCH * _SEQ_LEN + 1)
    bare = ["benchmarks.bare_start", _config(data_uri, "").to_json(), str(_VOCAB_SIZE)]
    own: list[Start] = []
    peer: list[Start] = []
    for number in range(times + 1):
        root_uri = (directory / f"checkpoints-{number}").as_uri()
        sides = [
            (own, ["penstock_trainer.rank", f"--config={_config(data_uri, root_uri).to_json()}"]),
            (peer, bare),
        ]
        for starts, argv in sides if number % 2 == 0 else reversed(sides):
            starts.append(first_step(argv))
    return [
        compare(
            f"start to first step, {unit}",
            np.array([getattr(start, seconds) for start in own[1:]]),
            np.array([getattr(start, seconds) for start in peer[1:]]),
            peer_name="import torch, model, optimizer, one step",
            unit=unit,
            target=target,
            machine=machine,
        )
        for unit, seconds, target in (("CPU s", "cpu_seconds", TARGET), ("s", "wall_seconds", ""))
    ]


def first_step(argv: Sequence[str], *, to_its_end: bool = False) -> Start:
    """Start `python -m <argv>` and end it when it has told of a step. Raises RuntimeError when it does not.

    With `to_its_end` it is left to end by itself, after what it does when its last step is done.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdout is not None, "it was asked for"
        try:
            for line in process.stdout:
                if '"event": "step"' in line:
                    # Not reaped yet, so its times are there even if it has ended.
                    spent = psutil.Process(process.pid).cpu_times()
                    return Start(spent.user + spent.system, time.perf_counter() - began)
        finally:
            if not to_its_end:
                process.kill()
            process.wait()
            process.stdout.close()
        stderr.seek(0)
        raise RuntimeError(f"{argv[0]} did no step:\n{stderr.read().decode()[-2000:]}")


def _config(data_uri: str, root_uri: str) -> JobConfig:
    return JobConfig(
        model=ModelConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=176),
        data=DataConfig(uri=data_uri, seq_len=_SEQ_LEN),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(uri=root_uri),
        steps=1,
        global_batch=_BATCH,
    )


def _environment() -> dict[str, str]:
    """One thread, and no launcher's or Vertex's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "PENSTOCK_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MALLOC_ARENA_MAX"):
        kept.pop(name, None)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
