"""Training loops that are run in turns, step by step, so that what disturbs the machine disturbs all of them alike.

The loop of a framework cannot be broken open from outside. So each arm runs in a thread of its own and says when it is
between two steps; there it waits until the others have done their step. Only one thread ever runs. A round goes through
the arms in an order that is drawn, the next one back (ABBA): the arm at the turn finds its memory still in the caches,
and that must not always be the same one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.rows import Samples

StepDone = Callable[[], None]
"""What an arm calls once in each step, always at the same place of its loop."""
Clock = Callable[[], float]
"""Seconds; read in the arm's own thread."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One training loop. `fit` blocks until its last step is done."""

    name: str
    fit: Callable[[StepDone], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of an arm's steps, by round."""

    step_seconds: Samples
    """By the clock that was given: CPU time of the arm's thread, or the time of a device."""
    process_seconds: Samples
    """CPU time of the whole process meanwhile: with an arm's helper threads, those of prefetch and of gloo."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the arms."""

    costs: Mapping[str, Costs]
    """By arm, of those that ran to their end."""
    errors: Mapping[str, Exception]


def interleave(
    arms: Sequence[Arm],
    *,
    steps: int,
    warmup: int,
    steps_per_turn: int = 1,
    clock: Clock = time.thread_time,
    seed: int = 0,
) -> Outcome:
    """Run all arms, each of `steps` steps, in turns of `steps_per_turn`; blocks until all have ended.

    `seed` is that of the order. What a loop does before its first boundary and the `warmup` steps after it are left out. An arm that raises, or that
    has another number of steps, is an error of the outcome and stops none of the others. Autograd on CPU computes in
    the thread that calls backward, so thread time is complete where operators use one thread (OMP_NUM_THREADS=1).
    """
    turns = [_Turns(arm, steps_per_turn, clock) for arm in arms]
    drawn, generator = list(turns), random.Random(seed)
    for number in range(steps // steps_per_turn):
        if number % 2 == 0:
            generator.shuffle(drawn)
        for one in drawn if number % 2 == 0 else reversed(drawn):
            one.take()
    for one in turns:
        one.finish(steps)
    return Outcome(
        costs={one.name: one.costs(warmup) for one in turns if one.error is None},
        errors={one.name: one.error for one in turns if one.error is not None},
    )


@dataclass(slots=True)
class _Turns:
    """An arm's thread, and the baton that it shares with the caller's."""

    arm: Arm
    steps_per_turn: int
    clock: Clock
    error: Exception | None = None
    boundaries: int = 0
    ended: bool = False
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _since: tuple[float, float] | None = None
    _spent: list[tuple[float, float]] = field(default_factory=list)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.arm.name

    def take(self) -> None:
        """Let the arm go on to its next boundary; nothing when it has ended."""
        if self._thread is None:
            # A daemon: an interrupted benchmark must not wait for loops that wait for their turn.
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        if self.ended:
            return
        self._go.release()
        self._back.acquire()

    def finish(self, steps: int) -> None:
        """Let the arm go on to its end."""
        while not self.ended:
            self.take()
        if self.error is None and self.boundaries != steps:
            self.error = RuntimeError(f"{self.name} has done {self.boundaries} steps instead of {steps}")

    def costs(self, warmup: int) -> Costs:
        spent = np.array(self._spent)[-(-warmup // self.steps_per_turn) :] / self.steps_per_turn
        return Costs(step_seconds=spent[:, 0], process_seconds=spent[:, 1])

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.arm.fit(self._step_done)
        except Exception as exc:
            self.error = exc
        finally:
            self.ended = True
            self._back.release()

    def _step_done(self) -> None:
        self.boundaries += 1
        if (self.boundaries - 1) % self.steps_per_turn:
            return
        if self._since is not None:
            now = self._now()
            self._spent.append((now[0] - self._since[0], now[1] - self._since[1]))
        self._back.release()
        self._go.acquire()
        self._since = self._now()

    def _now(self) -> tuple[float, float]:
        return self.clock(), time.process_time()
