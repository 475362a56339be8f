"""What is alive while a step is replayed, by kind, and the most that it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

Kind = Literal[
    "parameters",
    "masters",
    "gradients",
    "optimizer",
    "gathered",
    "communication",
    "activations",
    "logits",
    "other",
]


class Ledger:
    """Bytes that are taken and given back; remembers its fullest moment."""

    def __init__(self) -> None:
        self._held: Counter[Kind] = Counter()
        self._now = 0
        self.peak = 0
        """The most bytes held at once."""
        self.at_peak: Mapping[Kind, int] = {}
        """What they were of."""

    @property
    def now(self) -> int:
        """Bytes held."""
        return self._now

    def take(self, kind: Kind, size: int) -> None:
        """Hold so many bytes more."""
        self._held[kind] += size
        self._now += size
        if self._now > self.peak:
            self.peak, self.at_peak = self._now, dict(self._held)

    def give(self, kind: Kind, size: int) -> None:
        """Hold so many bytes fewer."""
        self._held[kind] -= size
        self._now -= size
        assert self._held[kind] >= 0, f"more {kind} given back than taken"

    def pass_through(self, kind: Kind, size: int) -> None:
        """Hold so many bytes for a moment."""
        self.take(kind, size)
        self.give(kind, size)
