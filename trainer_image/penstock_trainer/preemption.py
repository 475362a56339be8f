"""SIGTERM as a question that all ranks answer alike: is this step the last one before we save and leave?

Whether Vertex sends SIGTERM to a training container before a Spot VM goes is not documented and was not verified;
periodic checkpoints are what a run relies on, and this only saves more where the signal comes. It may then come to one
node, to all, or to all at different times: a rank that saved alone would wait for the others in the checkpoint's first
collective while they wait for it in the next step's.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class Preemption:
    """The flag of this rank, and the question to all ranks."""

    def __init__(self) -> None:
        self._is_asked_to_stop = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take SIGTERM for a wish rather than an end. For the main thread."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def ask(self, control: dist.ProcessGroup) -> Answer:
        """Begin to ask all ranks; they must all call this in the same step. Does not block."""
        flag = torch.tensor([int(self._is_asked_to_stop)], dtype=torch.int32)
        if control.size() == 1:  # a collective of one rank is a fifth of a millisecond of every step
            return Answer(flag, None)
        return Answer(flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control, async_op=True))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked_to_stop = True


class Answer:
    """What the ranks will have said. It travels on CPU while the step computes, so nothing waits for the device."""

    def __init__(self, flag: torch.Tensor, work: dist.Work | None) -> None:
        self._flag = flag
        self._work = work

    def wait(self) -> bool:
        """Whether any rank had been asked to stop. Blocks until the slowest rank has asked; alike on all ranks."""
        if self._work is not None:
            self._work.wait()
        return bool(self._flag.item())
