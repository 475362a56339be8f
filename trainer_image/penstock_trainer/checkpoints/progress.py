"""How far a run is: what a checkpoint says beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock_trainer.contract.checkpoint import Best


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the run is, over all attempts."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    tokens_seen: int = 0
    """Targets that were trained on."""
    best: Best | None = None
    """The best step so far, where the run evaluates."""
    stale_evaluations: int = 0
    """Evaluations since the best one."""

    def after(self, *, samples: int, targets: int) -> Progress:
        """After one more step over so many samples, in which so many targets were."""
        return replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + targets,
        )

    def evaluated(self, value: float, *, is_best: bool) -> Progress:
        """After the step was evaluated to a value of the run's metric."""
        if is_best:
            return replace(self, best=Best(step=self.step, value=value), stale_evaluations=0)
        return replace(self, stale_evaluations=self.stale_evaluations + 1)
