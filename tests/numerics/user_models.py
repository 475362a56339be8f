"""What a user's module may hold: a model's function that works, and some that do not."""

from __future__ import annotations

import torch
from torch import nn

weights = torch.ones(3)


def linear(*, width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)


def nothing() -> None:
    return None


def half() -> nn.Module:
    return nn.Linear(3, 2).bfloat16()
