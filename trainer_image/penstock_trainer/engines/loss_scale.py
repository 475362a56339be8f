"""Dynamic loss scaling, so that small gradients do not vanish in fp16.

Micikevicius et al., Mixed Precision Training, 2018; the constants are those of torch.amp.GradScaler.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps in a row without an overflow after which the scale is doubled."""


class LossScale:
    """The factor of the loss in backward. Alike on all ranks, as it depends on the global gradient alone."""

    def __init__(self) -> None:
        self._scale = torch.tensor(INITIAL_SCALE)
        self._good_steps = torch.tensor(0.0)

    @property
    def value(self) -> float:
        """The factor of the next step."""
        return float(self._scale)

    def update(self, *, overflowed: bool) -> None:
        """After a step: halve on an overflow, double after enough steps without one."""
        if overflowed:
            self._scale /= 2
            self._good_steps.zero_()
            return
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self._scale *= 2
            self._good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """For the canonical state; its tensors are the live ones, on CPU."""
        return {"scale": self._scale, "good_steps": self._good_steps}
