"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept: see CheckpointConfig."""

    last: int
    """Newest; 0: all."""
    every: int
    """Multiples of this step; 0: none."""
    best: bool
    """The best step, whatever its age."""

    def dropped(self, steps: Collection[int], *, best: int | None) -> list[int]:
        """Of the steps that are checkpoints, those that are kept for no reason, oldest first."""
        if not self.last:
            return []
        newest = set(sorted(steps)[-self.last :])
        return [
            step
            for step in sorted(steps)
            if step not in newest
            and not (self.best and step == best)
            and not (self.every and step % self.every == 0)
        ]
