"""Writes a checkpoint of the format that this version writes, and the losses of the steps after it.

    PYTHONPATH=tests python -m distributed.formats.make tests/distributed/formats/format-N

Run once for each format, by the last version that writes it; every later version must continue what it finds there.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.testing import run_cluster

STRATEGIES: tuple[Strategy, ...] = ("fsdp-full", "zero1")
SAVED, STEPS, RANKS = 3, 6, 2
"""The checkpoint's step, the run's last, and how many ranks of one node write it."""


def config_of(directory: Path, strategy: Strategy, *, root_uri: str, steps: int) -> JobConfig:
    """A run with dropout, whose random numbers have to be those of the step and rank too."""
    config = tiny_config((directory / "dataset").as_uri(), root_uri, strategy=strategy, steps=steps)
    return replace(
        config,
        model=replace(config.model, dim=16, ffn_dim=28, dropout=0.1),
        optim=replace(config.optim, decay_steps=0, warmup_steps=1),
        checkpoint=replace(config.checkpoint, interval=SAVED),
        processes_per_node=RANKS,
    )


def run(config: JobConfig) -> list[float]:
    """Losses of the steps that a run logged, from the first that this call trained."""
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    [node] = run_cluster([command], timeout_seconds=120.0)
    assert node.returncode == 0, node.stderr
    losses = [event.loss for event in step_events(node.stdout)]
    assert None not in losses
    return [loss for loss in losses if loss is not None]


def _forget_paths(manifest: Path) -> None:
    """Of the machine that made it; where data and checkpoints lie is no part of what a run is."""
    told = json.loads(manifest.read_text())
    told["config"]["data"]["uri"], told["config"]["checkpoint"]["uri"] = "gs://bucket/dataset", ""
    manifest.write_text(json.dumps(told, sort_keys=True, separators=(",", ":")))


def main(directory: Path) -> None:
    """Fill the directory anew."""
    shutil.rmtree(directory, ignore_errors=True)
    build_dataset(directory / "dataset", num_shards=1, max_tokens=4000)
    losses: dict[str, list[str]] = {}
    for strategy in STRATEGIES:
        root = directory / strategy
        with tempfile.TemporaryDirectory() as scratch:
            config = config_of(directory, strategy, root_uri=Path(scratch).as_uri(), steps=STEPS)
            losses[strategy] = [loss.hex() for loss in run(config)[SAVED:]]
            shutil.copytree(Path(scratch) / f"step-{SAVED:08d}", root / f"step-{SAVED:08d}")
        _forget_paths(root / f"step-{SAVED:08d}" / "manifest.json")
    (directory / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
