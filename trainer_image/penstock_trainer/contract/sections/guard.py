"""What a run does about steps that went wrong: a loss or gradient that is no number, or a loss far above the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_trainer.contract.fields import require

OnNonFinite = Literal["stop", "skip", "roll-back"]
OnSpike = Literal["ignore", "stop", "roll-back"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Judged for every step, at the next step that is logged, evaluated or saved.

    The update of a step whose gradient is not finite is left out in any case, by every engine; so state stays good and
    the judgement may come later. A roll-back continues from the newest checkpoint with the data that follows what was
    seen, so what is thought to have done it is not trained on again (as in Chowdhery et al., PaLM, 2022, section 5.1).
    """

    on_non_finite: OnNonFinite = "stop"
    """For a step whose loss or gradient is not finite. In fp16 such a gradient is what lowers the loss scale: it is
    skipped as long as the loss is finite."""
    max_skips: int = 10
    """Steps of an attempt whose update may be left out, in a row or not; with one more the run stops."""
    on_spike: OnSpike = "ignore"
    """For a step whose loss is more than spike_deviations above the median of the spike_window losses before it, in
    standard deviations as their median absolute deviation estimates them. `skip` is not offered: when the loss shows it,
    the update that caused it is done."""
    spike_deviations: float = 8.0
    spike_window: int = 64
    """Losses without which no step is called a spike."""
    max_roll_backs: int = 3
    """Of an attempt; with one more the run stops."""

    def __post_init__(self) -> None:
        for name in ("max_skips", "max_roll_backs"):
            require(getattr(self, name) >= 0, f"guard.{name}", getattr(self, name), "0 or more")
        require(self.spike_deviations > 0, "guard.spike_deviations", self.spike_deviations, "positive")
        require(self.spike_window >= 8, "guard.spike_window", self.spike_window, "at least 8 steps")
