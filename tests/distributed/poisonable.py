"""A user's model and data of which chosen samples make the loss infinite, or far too high, from finite inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SIZE = 96


class Poisonable(nn.Module):
    """Four features, three classes; a sample's strength multiplies its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, features: Tensor, weakness: Tensor) -> Tensor:
        logits: Tensor = self.layers(features) / weakness[:, None]
        return logits


class Samples:
    def __init__(self, poisoned: Sequence[int], weakness: float) -> None:
        self._poisoned = frozenset(poisoned)
        self._weakness = weakness

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor | float | int]:
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index in self._poisoned:  # and of a class that no other sample has
            return {"features": features, "weakness": self._weakness, "labels": 2}
        return {"features": features, "weakness": 1.0, "labels": int(features.sum() > 0)}


def model() -> Poisonable:
    return Poisonable()


def samples(*, split: str, poisoned: Sequence[int] = (), weakness: float = 0.0) -> Samples:
    return Samples(poisoned, weakness)
