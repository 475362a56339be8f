"""What rules know beside the spec itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Where a spec comes from and goes to."""

    location: str = ""
    """Region of the job; empty where it is not known, and rules about regions say nothing."""
    strategy: str = ""
    """`engine.strategy` of the trainer that the job runs, such as zero2; empty for other programs."""
    through_gcpc: bool = False
    """Whether CustomTrainingJobOp carries it: it drops empty pools and has not every field."""
