"""Steps that went wrong: found at the steps that are judged, and answered as GuardConfig says.

Engines leave out the update of a step whose gradient is not finite, so nothing is lost by judging later; losses and
norms wait on the device until then.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock_trainer.contract.config import GuardConfig
from penstock_trainer.engines.engine import StepResult
from penstock_trainer.errors import DivergedError

logger = logging.getLogger(__name__)

_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution (Rousseeuw and Croux, 1993)."""
_LEAST_SPREAD = 0.01
"""Of the median: losses that hardly differ are no measure of what is far."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step over all ranks."""

    number: int
    loss: float
    """Mean over the step's targets."""
    grad_norm: float

    @property
    def is_left_out(self) -> bool:
        """Whether its update was."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the steps since the last judgement were."""

    last: Step
    skipped: int
    """Of these steps, those whose update was left out."""
    roll_back: str = ""
    """Why the run has to go back to its newest checkpoint; empty when it goes on."""


class Guard:
    """Judges the steps of one attempt. Every rank comes to the same judgement, as it depends on global values alone."""

    def __init__(self, config: GuardConfig, *, scales_loss: bool, device: torch.device) -> None:
        """`scales_loss`: in fp16, an infinite gradient is how the loss scale is found."""
        self._config = config
        self._scales_loss = scales_loss
        self._device = device
        self._seen: list[tuple[int, StepResult]] = []
        self._window: deque[float] = deque(maxlen=config.spike_window)
        self._skips = 0
        self._roll_backs = 0

    def saw(self, step: int, result: StepResult) -> None:
        """Keep a step's result for the next judgement. Does not wait for the device."""
        self._seen.append((step, result))

    def judge(self) -> Judgement:
        """Of the steps seen since the last judgement, one at least. Collective; waits for the device.

        Raises DivergedError where the config says stop or its patience is at an end.
        """
        steps = self._over_all_ranks()
        skipped = [step for step in steps if step.is_left_out]
        wrong, answer = self._first_wrong(steps)
        self._skips += len(skipped)
        if wrong and answer == "stop":
            raise DivergedError(f"{wrong}. {_ADVICE}")
        if wrong and answer == "roll-back":
            self._count_roll_back(wrong)
            return Judgement(last=steps[-1], skipped=len(skipped), roll_back=wrong)
        if self._skips > self._config.max_skips and not self._scales_loss:
            raise DivergedError(
                f"the updates of {self._skips} steps were left out, and guard.max_skips is {self._config.max_skips}; the "
                f"last is step {skipped[-1].number}. {_ADVICE}"
            )
        if skipped:
            logger.warning("left out the update of step %s", ", ".join(str(step.number) for step in skipped))
        return Judgement(last=steps[-1], skipped=len(skipped))

    def _over_all_ranks(self) -> list[Step]:
        """The steps seen, which are forgotten."""
        losses = torch.stack([result.loss for _, result in self._seen])
        dist.all_reduce(losses)
        norms = torch.stack([self._on_device(result.grad_norm) for _, result in self._seen])
        told: list[list[float]] = torch.stack((losses, norms)).tolist()
        numbers = [number for number, _ in self._seen]
        self._seen.clear()
        return [Step(number, loss, norm) for number, loss, norm in zip(numbers, *told, strict=True)]

    def _on_device(self, norm: Tensor | float) -> Tensor:
        return torch.as_tensor(norm, dtype=torch.float32, device=self._device)

    def _first_wrong(self, steps: Sequence[Step]) -> tuple[str, str]:
        """What is wrong with the first step that is, and the answer to it; empty when none is."""
        config = self._config
        for step in steps:
            is_overflow = self._scales_loss and math.isfinite(step.loss)
            if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)) and not is_overflow:
                if config.on_non_finite != "skip":
                    told = f"the loss of step {step.number} is {step.loss} and its gradient's norm {step.grad_norm}"
                    return told, config.on_non_finite
                continue
            if config.on_spike != "ignore" and (limit := self._limit()) is not None and step.loss > limit:
                told = f"the loss of step {step.number} is {step.loss:.4f}, above {limit:.4f}: a spike"
                return told, config.on_spike
            self._window.append(step.loss)
        return "", ""

    def _limit(self) -> float | None:
        """The loss above which a step is a spike; None while the window is not full."""
        if len(self._window) < self._config.spike_window:
            return None
        median = statistics.median(self._window)
        spread = _TO_DEVIATION * statistics.median(abs(loss - median) for loss in self._window)
        return median + self._config.spike_deviations * max(spread, _LEAST_SPREAD * abs(median))

    def _count_roll_back(self, wrong: str) -> None:
        self._roll_backs += 1
        self._window.clear()
        if self._roll_backs > self._config.max_roll_backs:
            raise DivergedError(
                f"{wrong}, after {self._config.max_roll_backs} roll-backs (guard.max_roll_backs). {_ADVICE}"
            )


_ADVICE = (
    "Lower optim.learning_rate, lengthen optim.warmup_steps or look at the data of that step, and continue from a "
    "checkpoint before it."
)
