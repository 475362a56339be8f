"""The optimizer, its learning rate over time, and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_trainer.contract.fields import require

Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
LearningRateScaling = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW or SGD with warm-up and decay, and clipping by the true global gradient norm."""

    name: Optimizer = "adamw"
    learning_rate: float = 3e-3
    """Peak learning rate, reached after warm-up, at a global batch of lr_reference_batch."""
    lr_scaling: LearningRateScaling = "none"
    """How the peak grows with global_batch / lr_reference_batch: in proportion (Goyal et al., 2017) or by its square
    root (Krizhevsky, 2014). The ratio is that of batches, not of ranks: the global batch is fixed here, so a run that
    continues at another world size keeps its learning rate."""
    lr_reference_batch: int = 0
    """Global batch for which learning_rate was found; needed by lr_scaling."""
    schedule: Schedule = "cosine"
    """After warm-up: `cosine` or `linear` to the last step; `wsd`, constant and then linear over the last decay_steps
    (warm-up, stable, decay); `constant`."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay as a share of the peak."""
    warmup_steps: int = 20
    decay_steps: int = 0
    """Length of the decay of `wsd`."""
    weight_decay: float = 0.1
    """Decoupled for AdamW, L2 for SGD; applied to matrices only (tensors with two or more dims)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    """Of SGD; 0 keeps no state."""
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "optim.learning_rate", self.learning_rate, "positive")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more steps")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        for name in ("beta1", "beta2", "momentum"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "in [0, 1)")
        require(self.eps > 0, "optim.eps", self.eps, "positive")
        require(self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "positive")
        is_wsd = self.schedule == "wsd"
        require(
            self.decay_steps > 0 if is_wsd else self.decay_steps == 0,
            "optim.decay_steps",
            self.decay_steps,
            "positive for schedule 'wsd'"
            if is_wsd
            else f"0 for schedule {self.schedule!r}: only 'wsd' has it",
        )
        is_scaled = self.lr_scaling != "none"
        require(
            self.lr_reference_batch > 0 if is_scaled else self.lr_reference_batch == 0,
            "optim.lr_reference_batch",
            self.lr_reference_batch,
            "the positive global batch that learning_rate was found for"
            if is_scaled
            else "0 without optim.lr_scaling",
        )
