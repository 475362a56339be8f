"""A training in one process of plain torch, which every engine must match."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Batch, Objective
from penstock_trainer.optim import learning_rate


def plain_losses(
    config: JobConfig, vocab_size: int, batch_of: Callable[[int], Batch], *, steps: int
) -> list[float]:
    """Loss of each step of the built-in decoder on whole global batches."""
    model = Decoder(config.model, vocab_size)
    model.initialize(config.seed)
    return train_plainly(Objective(model), config, batch_of, steps=steps)


def train_plainly(
    objective: Objective,
    config: JobConfig,
    batch_of: Callable[[int], Batch],
    *,
    steps: int,
    left_out: int | None = None,
) -> list[float]:
    """Loss of each step, with torch's unfused AdamW and its own clipping; the update of step `left_out` is not done."""
    decayed = [weight for weight in objective.parameters() if weight.ndim >= 2]
    others = [weight for weight in objective.parameters() if weight.ndim < 2]
    optim = config.optim
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        loss = objective(batch) / batch["labels"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, config.steps, global_batch=config.global_batch)
        if step != left_out:
            optimizer.step()
        losses.append(loss.item())
    return losses
