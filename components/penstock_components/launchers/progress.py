"""Progress of a long task as structured lines on stdout, at most one every few seconds."""

from __future__ import annotations

import sys
import time

from penstock_trainer.contract.events import ProgressEvent


class Progress:
    """Counts units done; writes a ProgressEvent when the last one is `interval_seconds` old, and one at the end."""

    def __init__(self, *, total: float, unit: str, interval_seconds: float = 5.0) -> None:
        self._done = 0.0
        self._total = total
        self._unit = unit
        self._interval_seconds = interval_seconds
        self._last = time.monotonic()

    def advance(self, units: float) -> None:
        """Count `units` more."""
        if not units:
            return
        self._done += units
        if self._done >= self._total or time.monotonic() - self._last >= self._interval_seconds:
            self._last = time.monotonic()
            event = ProgressEvent(done=self._done, total=self._total, unit=self._unit)
            sys.stdout.write(event.to_line() + "\n")
            sys.stdout.flush()
