"""Questions that all ranks answer alike before they act: one that saved or stopped alone would leave the others waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist


def ask(control: dist.ProcessGroup, *flags: bool) -> Answer:
    """Begin to ask whether any rank says yes, to several things at once. All ranks call this in the same step.

    Does not block. On CPU, over `control` (gloo), so that nothing waits for the device.
    """
    said = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    if control.size() == 1:  # a collective of one rank is a fifth of a millisecond of every step
        return Answer(said, None)
    return Answer(said, dist.all_reduce(said, op=dist.ReduceOp.MAX, group=control, async_op=True))


class Answer:
    """What the ranks will have said. It travels while the step computes."""

    def __init__(self, said: torch.Tensor, work: dist.Work | None) -> None:
        self._said = said
        self._work = work

    def wait(self) -> tuple[bool, ...]:
        """Of each question, whether any rank had said yes. Blocks until the slowest rank has asked; alike on all ranks."""
        if self._work is not None:
            self._work.wait()
        return tuple(bool(flag) for flag in self._said.tolist())
