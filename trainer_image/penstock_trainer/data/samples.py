"""The seam between what is trained on and the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.model.objective import Batch


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What one rank trains on in one step."""

    batches: list[Batch]
    """Micro-batches, as many as the plan's accumulation."""
    num_targets: int
    """Labels among them that are not IGNORED."""


class Samples(Protocol):
    """A train split as a sequence that never ends: a sample is the same one wherever and whenever it is asked for."""

    targets_per_sample: int | None
    """None: it differs, and the ranks have to add up their own."""

    def step(self, first: int, plan: BatchPlan) -> LocalStep:
        """This rank's part of a step that begins at sample `first`, on CPU. Called by the loader's thread.

        Raises DatasetError for a sample that cannot be used.
        """
