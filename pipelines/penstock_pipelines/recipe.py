"""A recipe: one complete run as a value. Recipes are functions under recipes/, named for what they run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_components.jobs.resources import Resources
from penstock_trainer.contract.config import JobConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the pretrain pipeline needs besides images; everything here is fixed at compile time."""

    name: str
    """Lower-case letters, digits and hyphens: the pipeline and its display names carry it."""
    description: str
    config: JobConfig
    """Values of run time parameters are their defaults."""
    resources: Resources
    vocab_size: int = 4096
    eval_fraction: float = 0.02
    min_improvement_over_unigram: float = 0.0
    """Default of the gate's floor: share of bits per byte below the unigram baseline."""

    @property
    def required_tokens(self) -> int:
        """Tokens that one global batch takes; a corpus with fewer is refused when it is staged."""
        return self.config.global_batch * (self.config.data.seq_len + 1)
