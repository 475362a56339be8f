"""What interruptions cost: the share of a run's time that ends up in the model, and the best checkpoint interval.

    goodput = 1 - s/tau - (tau/2 + R) / MTBF        s   seconds that a save stops training
    tau*    = sqrt(2 s MTBF)                        tau seconds between two saves
                                                    R   seconds from an interruption to the first new step

To first order in tau/MTBF: an interruption comes at any moment of an interval and loses half of it on average (Young,
"A first order approximation to the optimum checkpoint interval", 1974; as availability arXiv:2410.18124).
What a run measures of itself is in the same words: penstock_trainer.contract.goodput.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_trainer.contract.goodput import best_interval_seconds

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """How often machines are lost and what that costs. No figure for Spot is published: give one that you have seen.

    Raises ValueError for a figure that is not above 0.
    """

    node_mtbf_hours: float
    """Mean time between two losses of one machine."""
    restart_seconds: float
    """From a loss to the first new step: machines, images, process start, restore."""
    save_stall_seconds: float
    """How long a save stops training."""

    def __post_init__(self) -> None:
        for name in ("node_mtbf_hours", "restart_seconds", "save_stall_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)} must be above 0 and finite.")

    def mtbf_seconds(self, num_nodes: int) -> float:
        """Of a job that stops when any of its machines does: losses add up (machines fail independently)."""
        return self.node_mtbf_hours * HOUR / num_nodes

    def best_interval_seconds(self, num_nodes: int) -> float:
        """Between two saves, for the highest goodput: tau*."""
        return best_interval_seconds(
            save_stall_seconds=self.save_stall_seconds, mtbf_seconds=self.mtbf_seconds(num_nodes)
        )

    def goodput(self, num_nodes: int, interval_seconds: float) -> float:
        """Share of time that trains, 0 to 1; 0 for a job that is lost about as fast as it restarts."""
        lost = (interval_seconds / 2 + self.restart_seconds) / self.mtbf_seconds(num_nodes)
        return max(0.0, 1 - self.save_stall_seconds / interval_seconds - lost)

    def expected(self, num_nodes: int, hours: float) -> float:
        """Interruptions in so many hours of wall time."""
        return hours * HOUR / self.mtbf_seconds(num_nodes)
