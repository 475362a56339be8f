"""A user's model with running statistics, and data whose ranks would have different ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layers(features)
        return logits


class Samples:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        generator = torch.Generator().manual_seed(self._seed + index)
        features = torch.randn(4, generator=generator) * 3 + index / 8
        return {"features": features, "labels": index % 3}


def model() -> Normalised:
    return Normalised()


def samples(*, split: str, **_: Any) -> Samples:
    return Samples(1000 if split == "evaluation" else 0)
