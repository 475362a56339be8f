"""SIGTERM as a wish: this step is the last one, then state is saved and the process ends.

Whether Vertex sends SIGTERM to a training container before a Spot VM goes is not documented and was not verified;
periodic checkpoints are what a run relies on, and this only saves more where the signal comes. It may then come to one
node, to all, or to all at different times, so ranks ask each other (agreement.py) and none stops alone.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Preemption:
    """Whether this rank was told to stop, and how long it still has."""

    def __init__(self, *, budget_seconds: float = math.inf) -> None:
        """`budget_seconds`: from the signal to the end of the process."""
        self._budget_seconds = budget_seconds
        self._told_at: float | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take SIGTERM for a wish rather than an end. For the main thread."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @property
    def is_told(self) -> bool:
        """Whether the signal has come to this rank."""
        return self._told_at is not None

    @property
    def seconds_left(self) -> float:
        """Of the budget; all of it while the signal has not come here. Below 0 when it is used up."""
        used = 0.0 if self._told_at is None else time.monotonic() - self._told_at
        return self._budget_seconds - used

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._told_at = self._told_at or time.monotonic()
