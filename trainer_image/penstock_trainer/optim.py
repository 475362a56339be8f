"""AdamW and its schedule, alike for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from penstock_trainer.contract.config import OptimConfig

STATE_KEYS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors of the parameter's own shape; beside them it counts `step`."""


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Of the step after `step` steps are done: linear warm-up to the peak, then cosine to the last step's minimum.

    A pure function of its arguments, so it needs no state in a checkpoint. `steps` is more than the warm-up's.
    """
    done = step + 1
    if done <= config.warmup_steps:
        return config.learning_rate * done / config.warmup_steps
    progress = (done - config.warmup_steps) / (steps - config.warmup_steps)
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in its fused form; weight decay for matrices only. The learning rate is set before each step."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """For the next step of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def materialize_state(optimizer: torch.optim.AdamW) -> None:
    """Create the state that AdamW would create in its first step, so that a checkpoint can be loaded into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{key: torch.zeros_like(parameter, requires_grad=False) for key in STATE_KEYS},
            }
