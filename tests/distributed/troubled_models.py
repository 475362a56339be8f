"""What test_observe.py trains: a tiny classifier and its data, and what can be wrong with either on rank 1."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SECONDS = 0.04
"""That rank 1 takes longer: for a sample, or for a micro-batch."""
HANGS_SECONDS = 6.0


def compute() -> None:
    """Keep a CPU busy for SECONDS, however many others want it."""
    end = time.thread_time() + SECONDS
    while time.thread_time() < end:
        pass


def wait() -> None:
    time.sleep(SECONDS)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, trouble: Callable[[], None] | None) -> None:
        self.trouble = trouble

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.trouble and os.environ["RANK"] == "1":
            self.trouble()
        return {"image": torch.full((8,), index / 64), "labels": torch.tensor(index % 2)}


def samples(split: str) -> Samples:
    return Samples(None)


def slow_samples(split: str) -> Samples:
    return Samples(wait)


class Classifier(nn.Module):
    def __init__(self, trouble: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.trouble = trouble
        self.linear = nn.Linear(8, 2)

    def forward(self, image: Tensor) -> Tensor:
        if self.trouble and os.environ.get("RANK") == "1":
            self.trouble()
        logits: Tensor = self.linear(image)
        return logits


def classifier() -> nn.Module:
    return Classifier()


def slow_classifier() -> nn.Module:
    return Classifier(compute)


def hanging_classifier() -> nn.Module:
    """Its rank 1 comes late to the third step, by more than the others wait."""
    calls = iter((0.0, 0.0, HANGS_SECONDS))
    return Classifier(lambda: time.sleep(next(calls, 0.0)))


class TooBig(Classifier):
    def forward(self, image: Tensor) -> Tensor:
        torch.empty(2**50)  # more than a process can address
        return super().forward(image)


def too_big_classifier() -> nn.Module:
    return TooBig()
