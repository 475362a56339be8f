"""From a process' start to its first new step after a checkpoint: our rank, and a script that only reads the bytes.

The floor is start-up as `start.py` has it and, besides, reading the checkpoint's objects into memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.random_dataset import build_dataset
from benchmarks.rows import Machine, Row, compare
from benchmarks.start import Start, first_step
from penstock_trainer.contract.config import CheckpointConfig, DataConfig, JobConfig, ModelConfig, OptimConfig

TARGET = "<= 1.3"
_VOCAB_SIZE = 8192
_SEQ_LEN = 32
_BATCH = 4
_SAVED = 1


def restart_rows(machine: Machine, directory: Path, *, times: int) -> list[Row]:
    """Both sides started in turns (ABBA), `times` each after one that fills the file cache."""
    data_uri = build_dataset(
        directory / "dataset", vocab_size=_VOCAB_SIZE, num_tokens=4 * _BATCH * _SEQ_LEN + 1
    )
    root = directory / "checkpoints"
    first = _config(data_uri, root.as_uri(), steps=_SAVED)
    first_step(["penstock_trainer.rank", f"--config={first.to_json()}"], to_its_end=True)
    objects = [str(path) for path in Path(root, f"step-{_SAVED:08d}").rglob("*.distcp")]
    nbytes = sum(Path(path).stat().st_size for path in objects)
    config = _config(data_uri, root.as_uri(), steps=_SAVED + 1000)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=10_000))
    own: list[Start] = []
    peer: list[Start] = []
    sides = [
        (own, ["penstock_trainer.rank", f"--config={config.to_json()}"]),
        (peer, ["benchmarks.bare_start", config.to_json(), str(_VOCAB_SIZE), *objects]),
    ]
    for number in range(times + 1):
        for starts, argv in sides if number % 2 == 0 else reversed(sides):
            starts.append(first_step(argv))
    return [
        compare(
            f"restart to first new step, {nbytes / 2**20:.0f} MiB, {unit}",
            np.array([getattr(start, seconds) for start in own[1:]]),
            np.array([getattr(start, seconds) for start in peer[1:]]),
            peer_name="import torch, model, optimizer, read the bytes, one step",
            unit=unit,
            target=target,
            machine=machine,
        )
        for unit, seconds, target in (("CPU s", "cpu_seconds", TARGET), ("s", "wall_seconds", ""))
    ]


def _config(data_uri: str, root_uri: str, *, steps: int) -> JobConfig:
    return JobConfig(
        model=ModelConfig(dim=512, num_layers=4, num_heads=8, num_kv_heads=8, ffn_dim=1408),
        data=DataConfig(uri=data_uri, seq_len=_SEQ_LEN),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(uri=root_uri),
        steps=steps,
        global_batch=_BATCH,
        log_interval=1,
    )
