"""The training run that tests of several ranks share: small enough for seconds, with everything in it that a big one has."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from numerics.plain_torch import plain_losses
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.events import Event, StepEvent, parse_event
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.data.token_windows import TokenWindows
from penstock_trainer.model.objective import Batch

# Losses of two strategies or world sizes differ by the order of fp32 sums: about 1e-6 of a loss near 5 over these
# steps. A missing average, a clip by a local norm or a repeated batch shows in the third digit.
LOSS_TOLERANCE = 5e-6


def tiny_config(
    data_uri: str, root_uri: str = "", *, strategy: Strategy = "fsdp-full", **more: Any
) -> JobConfig:
    """12 steps of 12 sequences, accumulated over 2 micro-batches or more, clipped in every step."""
    config = JobConfig(
        # Grouped heads; sizes that 2 and 3 ranks cut unevenly.
        model=ModelConfig(
            dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=52, tie_embeddings=False
        ),
        data=DataConfig(uri=data_uri, seq_len=32),
        optim=OptimConfig(warmup_steps=3, clip_norm=0.3),
        engine=tiny_engine(strategy),
        checkpoint=CheckpointConfig(uri=root_uri, interval=4),
        steps=12,
        global_batch=12,
        max_micro_batch=3,
        log_interval=1,
        seed=7,
    )
    return replace(config, **more)


def tiny_engine(strategy: Strategy) -> EngineConfig:
    """With what a strategy does only for bigger models, and groups of one rank for any world size."""
    more: dict[str, Any] = {}
    if strategy == "fsdp-hybrid":
        more["shard_size"] = 1
    if strategy == "zero3":
        more["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return EngineConfig(strategy=strategy, timeout_seconds=60, **more)


def windows_in_place(directory: Path, manifest: DatasetManifest, config: JobConfig) -> TokenWindows:
    """The train split without a process group."""
    import numpy as np

    shards = [np.fromfile(directory / shard.name, dtype="<u2") for shard in manifest.train]
    return TokenWindows(shards, seq_len=config.data.seq_len, seed=config.seed)


def reference_losses(directory: Path, config: JobConfig) -> list[float]:
    """The same run in plain torch, on whole batches."""
    manifest = read_manifest(directory.as_uri())
    windows = windows_in_place(directory, manifest, config)

    def batch_of(step: int) -> Batch:
        # Labels are shifted here and not by what is tested.
        tokens = windows.samples(step * config.global_batch, config.global_batch)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return plain_losses(config, manifest.tokenizer.vocab_size, batch_of, steps=config.steps)


def step_events(stdout: str) -> list[StepEvent]:
    """The steps that a rank has logged."""
    events = [parse_event(line) for line in stdout.splitlines()]
    return [event for event in events if isinstance(event, StepEvent)]


def losses_by_scenario(stdout: str) -> dict[str, dict[int, float]]:
    """Loss by step of each scenario of training_ranks.py."""
    return {
        name: {
            event.step: math.nan if event.loss is None else event.loss
            for event in events
            if isinstance(event, StepEvent)
        }
        for name, events in events_by_scenario(stdout).items()
    }


def events_by_scenario(stdout: str) -> dict[str, list[Event]]:
    """What rank 0 has told in each scenario of training_ranks.py; of one that ran twice, after what it had told before."""
    found: dict[str, list[Event]] = {}
    current: list[Event] = []
    for line in stdout.splitlines():
        if line.startswith('{"scenario"'):
            current = found.setdefault(json.loads(line)["scenario"], [])
        elif (event := parse_event(line)) is not None:
            current.append(event)
    return found
