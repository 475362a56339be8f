"""How long a rank's collectives took.

What can be known differs by backend, and the number with it:

gloo  The exposed wait: seconds of forward, backward and optimizer in which the rank's main thread slept, as it does for a
      collective alone (see clock.HostClock). What ran beside the computation is not in it. None where a rank computes
      with several threads, or the kernel keeps no schedstat.
NCCL  Seconds that the rank's NCCL kernels ran, added up, waiting for other ranks included; computation and kernels of
      other groups may have run beside them. From the flight recorder, which remembers the last collectives only: it is
      their share of the time they span, times the step. None without a flight recorder, and within a minute of the last
      reading, which takes tens of milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from penstock_trainer.observe.flight import Collective

_READ_SECONDS = 60.0
"""Least time between two readings of NCCL's flight recorder."""


def busy_share(collectives: Iterable[Collective], *, since_ns: int) -> float | None:
    """Durations of these collectives, added up, over the time in which they were created; of those after `since_ns`.

    None when nothing is known: no two that ended, or none with a duration. Durations are the device's, the times of
    creation the host's. The last one's is left out, as it lies beyond that time. At most 1.
    """
    timed = sorted(
        (collective.created_ns, collective.duration_ms * 1e6)
        for collective in collectives
        if collective.duration_ms is not None and collective.created_ns >= since_ns
    )
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return None
    running = sum(duration for _, duration in timed[:-1])
    return min(1.0, running / (timed[-1][0] - timed[0][0]))


class NcclTime:
    """Reads the share of NCCL's kernels from the flight recorder, not more often than is cheap."""

    def __init__(self) -> None:
        self._next_read = 0.0
        self._since_ns = time.time_ns()

    def share(self, read: Callable[[], Iterable[Collective]]) -> float | None:
        """`busy_share` since the last reading; None, and nothing is read, while that is too close."""
        if time.monotonic() < self._next_read:
            return None
        share = busy_share(read(), since_ns=self._since_ns)
        self._next_read = time.monotonic() + _READ_SECONDS
        self._since_ns = time.time_ns()
        return share
