"""The run that strategies are compared on, and the same run in one process of plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from numerics.plain_torch import plain_losses
from penstock_trainer.contract.config import (
    DataConfig,
    EngineConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
)
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Batch, Objective

VOCAB_SIZE = 96
SEQ_LEN = 24
STEPS = 50


def parity_config(engine: EngineConfig | None = None, **more: Any) -> JobConfig:
    """Grouped heads, a head of its own, sizes that ranks cut unevenly, and clipping that bites in every step."""
    config = JobConfig(
        model=ModelConfig(
            dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=52, tie_embeddings=False
        ),
        data=DataConfig(seq_len=SEQ_LEN),
        optim=OptimConfig(learning_rate=5e-3, warmup_steps=3, clip_norm=0.3),
        engine=engine or EngineConfig(),
        steps=STEPS,
        global_batch=8,
        max_micro_batch=4,
        seed=11,
    )
    return replace(config, **more)


def samples(config: JobConfig, step: int) -> torch.Tensor:
    """The step's [global_batch, SEQ_LEN + 1] token ids: walks with a small stride, so that there is much to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(VOCAB_SIZE, (config.global_batch, 1), generator=generator)
    strides = torch.randint(1, 4, (config.global_batch, SEQ_LEN), generator=generator)
    return torch.cat((start, start + strides.cumsum(1)), dim=1) % VOCAB_SIZE


def as_batch(tokens: torch.Tensor) -> Batch:
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def micro_batches(config: JobConfig, step: int, rank: int, plan: BatchPlan) -> list[Batch]:
    mine = samples(config, step)[rank * plan.per_rank : (rank + 1) * plan.per_rank]
    return [as_batch(micro) for micro in torch.split(mine, plan.micro_batch)]


def reference(config: JobConfig, steps: int) -> list[float]:
    """Losses of one process."""
    return plain_losses(config, VOCAB_SIZE, lambda step: as_batch(samples(config, step)), steps=steps)


def reference_gradients(config: JobConfig) -> dict[str, torch.Tensor]:
    """Of the first step, in fp64 and without clipping."""
    model = Decoder(config.model, VOCAB_SIZE)
    model.initialize(config.seed)
    objective = Objective(model.double())
    loss = objective(as_batch(samples(config, 0))) / (config.global_batch * SEQ_LEN)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def main() -> None:
    """Print the reference curve: python -m numerics.parity_run > tests/numerics/reference_losses.json"""
    print(json.dumps({"losses": reference(parity_config(), STEPS)}, indent=0))


if __name__ == "__main__":
    main()
