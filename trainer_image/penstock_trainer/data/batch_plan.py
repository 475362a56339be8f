"""How a step's global batch is cut over ranks and micro-batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.errors import BatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How a global batch is cut over the ranks."""

    per_rank: int
    """Samples of a step on each rank: its contiguous part of the global batch."""
    micro_batch: int
    """Samples that go through the model at once."""
    accumulation: int
    """Micro-batches of a step."""

    @classmethod
    def of(cls, config: JobConfig, world_size: int) -> BatchPlan:
        """The fewest equal micro-batches that max_micro_batch allows. Raises BatchError."""
        batch = config.global_batch
        if batch % world_size:
            below, above = batch - batch % world_size, batch + world_size - batch % world_size
            fitting = [size for size in range(1, min(batch, 4096) + 1) if batch % size == 0]
            raise BatchError(
                f"global_batch = {batch} does not divide among {world_size} ranks. "
                f"Give {f'{below} or ' if below else ''}{above}, or use a number of ranks of {fitting}."
            )
        per_rank = batch // world_size
        micro = config.micro_batch(world_size)
        logger.info(
            "micro_batch=%d accumulation=%d (global_batch %d over %d ranks is %d samples each; "
            "the largest divisor of that up to max_micro_batch %d)",
            *(micro, per_rank // micro, batch, world_size, per_rank, config.max_micro_batch),
        )
        return cls(per_rank=per_rank, micro_batch=micro, accumulation=per_rank // micro)
