"""A user's dataset with a sample that is no number, and a model for it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn


class Points:
    """64 points; the ones of `bad` are NaN."""

    def __init__(self, bad: list[int]) -> None:
        self._inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        self._inputs[bad] = float("nan")

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"x": self._inputs[index], "labels": index % 2}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def points(split: Literal["train", "evaluation"], *, bad: list[int], **_: Any) -> Points:
    return Points(bad)


def classifier() -> Classifier:
    return Classifier()
