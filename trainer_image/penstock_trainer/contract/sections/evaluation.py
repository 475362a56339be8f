"""How good the model is while it trains, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_trainer.contract.fields import require

Metric = Literal["loss", "accuracy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """A fixed part of the held-out split, scored at an interval."""

    interval: int = 0
    """Optimizer steps between evaluations; the last step is evaluated too. 0: none."""
    max_samples: int = 256
    """Held-out samples that are scored, the first ones, always the same; 0: all. A sample of text is a window of at
    most data.seq_len targets of one document."""
    metric: Metric = "loss"
    """By which one step is better than another, and what a tuning trial reports: the loss in nats per target (lower is
    better) or the share of targets predicted (higher is)."""
    min_improvement: float = 0.0
    """How much better than the best before it a step must be to count as an improvement."""
    patience: int = 0
    """Evaluations in a row without an improvement that end the run; 0: none do."""
    export_best: bool = False
    """Export the weights of the best step, and not the last's. The best step is always saved."""

    def __post_init__(self) -> None:
        for name in ("interval", "max_samples", "min_improvement", "patience"):
            require(getattr(self, name) >= 0, f"evaluation.{name}", getattr(self, name), "0 or more")
        for name in ("patience", "export_best"):
            require(
                self.interval > 0 or not getattr(self, name),
                f"evaluation.{name}",
                getattr(self, name),
                "left alone while evaluation.interval is 0",
            )
