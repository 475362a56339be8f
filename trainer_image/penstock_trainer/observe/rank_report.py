"""What each rank measured between two logged lines, and what of all of them a line shows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_trainer.observe.clock import COMPUTING, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank; seconds are the mean per step since the line before."""

    step_seconds: float
    seconds: Mapping[Part, float]
    communication_seconds: float | None
    """See communication; None: not known."""
    peak_memory_bytes: int
    utilization: float | None
    """From 0 to 1; None: not known."""

    @property
    def own_seconds(self) -> float | None:
        """Data and computation less communication: what the rank needs by itself. None: not known.

        With NCCL that is a lower bound, since communication that runs beside computation is taken off too.
        """
        if self.communication_seconds is None:
            return None
        spent = self.seconds["data"] + sum(self.seconds[part] for part in COMPUTING)
        return max(0.0, spent - self.communication_seconds)


def shown(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Fields of events.StepEvent from the reports of all ranks, by rank. The split is the slowest rank's, else rank 0's."""
    own = [report.own_seconds for report in reports]
    known = [seconds for seconds in own if seconds is not None]
    slowest = max(range(len(own)), key=lambda rank: own[rank] or 0.0) if len(known) == len(own) else None
    of = reports[slowest or 0]
    utilizations = [report.utilization for report in reports if report.utilization is not None]
    return {
        "step_seconds": of.step_seconds,
        **{f"{part}_seconds": seconds for part, seconds in of.seconds.items()},
        "communication_seconds": of.communication_seconds,
        "slowest_rank": slowest,
        "slowest_rank_seconds": own[slowest] if slowest is not None else None,
        "median_rank_seconds": statistics.median(known) if slowest is not None else None,
        "peak_memory_bytes": max(report.peak_memory_bytes for report in reports),
        "accelerator_utilization": statistics.fmean(utilizations) if utilizations else None,
    }
