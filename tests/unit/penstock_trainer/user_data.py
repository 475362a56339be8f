"""What a user's data function may return."""

from __future__ import annotations

from typing import Any

import numpy as np


class Rows:
    """Eight rows, each a dict that `make` builds from its index."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def mixed(split: str, *, uri: str = "") -> Rows:
    """fp64 arrays, Python numbers, and labels of which every other is no target."""
    offset = 100 if split == "evaluation" else 0
    return Rows(
        lambda index: {
            "x": np.full(3, index + offset, dtype=np.float64),
            "position": index,
            "labels": -100 if index % 2 else index,
        }
    )


def ragged(split: str) -> Rows:
    return Rows(lambda index: {"x": np.zeros(index + 1), "labels": 0})


def unlabelled(split: str) -> Rows:
    return Rows(lambda index: {"x": 1.0, "target": 0})


def tuples(split: str) -> Rows:
    return Rows(lambda index: (1.0, 0))


def failing(split: str) -> Rows:
    def make(index: int) -> dict[str, float]:
        if index == 5:
            raise OSError("disk gone")
        return {"x": 1.0, "labels": 0}

    return Rows(make)


def infinite(split: str) -> Rows:
    return Rows(lambda index: {"x": float("inf") if index == 5 else 1.0, "labels": 0})


def stream(split: str) -> Any:
    return iter(())


def empty(split: str) -> list[Any]:
    return []
