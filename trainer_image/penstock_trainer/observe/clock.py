"""Where the time of a step goes, added up between two logged lines.

On CUDA what the device does is timed by events, which are read when they are asked for and not while steps are under
way, so that no span waits for the device. What keeps the host, such as a wait for data, is timed by the host's clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import torch

Part = Literal["data", "forward", "backward", "optimizer", "checkpoint", "evaluation"]
COMPUTING: tuple[Part, ...] = ("forward", "backward", "optimizer")
"""The parts that the device does, and during which ranks wait for each other."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_MOST_OPEN_SPANS = 4096
"""Timed by events that are not read yet; of a long log interval the earlier ones are read on the way."""


@dataclass(frozen=True, slots=True)
class Split:
    """What a clock has added up since it was last read."""

    seconds: Mapping[Part, float]
    """Of all parts; 0 for what did not happen."""
    blocked: float | None
    """Seconds of forward, backward and optimizer in which the rank's main thread was asleep; None where that says
    nothing or cannot be had. See HostClock."""


class Clock(Protocol):
    """Times the parts of the steps of one rank. Used by one thread."""

    def span(self, part: Part) -> AbstractContextManager[None]:
        """Time what is done within it. Spans of one part are not nested."""

    def read(self) -> Split:
        """What has been added up since the last call, which begins anew. Waits for the device."""


def clock_for(device: torch.device, *, finds_waits: bool = False) -> Clock:
    """The clock of a rank on this device. `finds_waits`: its collectives are gloo's, see HostClock."""
    return DeviceClock() if device.type == "cuda" else HostClock(finds_waits=finds_waits)


class HostClock:
    """Clock of what the host does.

    With `finds_waits` it also tells how long the constructing thread slept within spans that compute. There it computes
    by itself, and sleeps only in gloo's collectives, which threads of their own carry out. Of the wall time that is what
    neither the thread's CPU time accounts for nor the time that the kernel had it wait for a CPU (schedstat): a rank
    whose CPU is taken by others does not pass for one that waits. With several threads of computation sleeping means
    waiting for them too, so nothing is told then, nor on a kernel without schedstat.
    """

    def __init__(self, *, finds_waits: bool = False) -> None:
        queue = _open_schedstat() if finds_waits and torch.get_num_threads() == 1 else None
        self._spans: dict[Part, _HostSpan | _WaitingSpan] = {
            "data": _HostSpan(),
            "checkpoint": _HostSpan(),
            "evaluation": _HostSpan(),
        }
        for part in COMPUTING:
            self._spans[part] = _HostSpan() if queue is None else _WaitingSpan(queue)

    def span(self, part: Part) -> AbstractContextManager[None]:
        """See Clock.span."""
        return self._spans[part]

    def read(self) -> Split:
        """See Clock.read."""
        waiting = [span for span in self._spans.values() if isinstance(span, _WaitingSpan)]
        blocked = sum(span.take_blocked() for span in waiting) if waiting else None
        return Split({part: span.take() for part, span in self._spans.items()}, blocked)


class DeviceClock:
    """Clock of what a CUDA device does in its current stream, and of what keeps the host."""

    def __init__(self) -> None:
        self._host = HostClock()
        self._spans = {part: _DeviceSpan() for part in COMPUTING}

    def span(self, part: Part) -> AbstractContextManager[None]:
        """See Clock.span."""
        return self._spans.get(part) or self._host.span(part)

    def read(self) -> Split:
        """See Clock.read."""
        told = self._host.read()
        return Split({**told.seconds, **{part: span.take() for part, span in self._spans.items()}}, None)


class _HostSpan(AbstractContextManager[None]):
    __slots__ = ("_began", "_seconds")

    def __init__(self) -> None:
        self._began = self._seconds = 0.0

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds += time.perf_counter() - self._began


class _WaitingSpan(_HostSpan):
    __slots__ = ("_blocked", "_busy", "_queue")

    def __init__(self, queue: int) -> None:
        super().__init__()
        self._queue = queue
        self._busy = self._blocked = 0.0

    def take_blocked(self) -> float:
        blocked, self._blocked = self._blocked, 0.0
        return max(0.0, blocked)

    def __enter__(self) -> None:
        self._busy = self._busy_seconds()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        self._seconds += seconds
        self._blocked += seconds - (self._busy_seconds() - self._busy)

    def _busy_seconds(self) -> float:
        """Of the thread: on a CPU, or ready for one."""
        return time.thread_time() + int(os.pread(self._queue, 64, 0).split()[1]) * 1e-9


class _DeviceSpan(AbstractContextManager[None]):
    __slots__ = ("_began", "_open", "_seconds", "_spare")

    def __init__(self) -> None:
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def take(self) -> float:
        self._close(len(self._open))
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __enter__(self) -> None:
        self._began = self._record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.append((self._began, self._record()))
        if len(self._open) > _MOST_OPEN_SPANS:
            self._close(_MOST_OPEN_SPANS // 2)  # long past: there is nothing to wait for

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _close(self, count: int) -> None:
        for began, ended in self._open[:count]:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) * 1e-3
            self._spare += (began, ended)
        del self._open[:count]


def _open_schedstat() -> int | None:
    """The calling thread's statistics: seconds on a CPU and seconds ready for one, in nanoseconds. None: not kept."""
    try:
        descriptor = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    counted, *_ = os.pread(descriptor, 64, 0).split() or [b"0"]
    if int(counted):
        return descriptor
    os.close(descriptor)
    return None
