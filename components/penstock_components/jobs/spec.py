"""A distributed training job: pools in their roles, scheduling, and the forms in which it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_components.jobs.pools import Container, JobSpecError, Machine, WorkerPool
from penstock_components.jobs.reduction_server import ReductionServer

Strategy = Literal["STANDARD", "SPOT", "FLEX_START"]
_LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """When the job's machines are had and what happens when one fails. One strategy for all pools: the API has no other."""

    strategy: Strategy = "STANDARD"
    timeout_seconds: int = _LONGEST_TIMEOUT_SECONDS
    """Longest running time; 7 days is the service's own limit."""
    restart_job_on_worker_restart: bool = True
    """A restarted worker cannot join an NCCL group that is running: the whole job starts again and resumes."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_seconds <= _LONGEST_TIMEOUT_SECONDS:
            raise JobSpecError(
                f"timeout_seconds {self.timeout_seconds} must be 1 to {_LONGEST_TIMEOUT_SECONDS} (7 days)."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """Nodes of one machine type, of which the first is the primary, and perhaps reducers."""

    machine: Machine
    num_nodes: int
    container: Container
    location: str
    """Region; decides which multi-region the reducers' image comes from."""
    reduction_server: ReductionServer | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise JobSpecError(f"num_nodes {self.num_nodes} must be at least 1.")
        if self.reduction_server is None:
            return
        if self.num_nodes < 2:
            raise JobSpecError(
                "a Reduction Server needs at least 2 nodes: its pool has index 2, and GCPC drops an empty pool 1, "
                "which would move the reducers among the workers."
            )
        if self.scheduling.strategy == "FLEX_START":
            raise JobSpecError(
                "FLEX_START wants the same machine in all pools; it cannot be had with a Reduction Server."
            )

    @property
    def pools(self) -> tuple[WorkerPool, ...]:
        """Pool 0: the primary, pool 1: the other nodes, pool 2: the reducers. No pool is ever empty."""
        primary = WorkerPool(machine=self.machine, replica_count=1, container=self.container)
        pools = [primary]
        if self.num_nodes > 1:
            pools.append(
                WorkerPool(machine=self.machine, replica_count=self.num_nodes - 1, container=self.container)
            )
        if self.reduction_server is not None:
            pools.append(self.reduction_server.pool(self.location))
        return tuple(pools)

    def to_gcpc(self) -> dict[str, Any]:
        """The arguments of CustomTrainingJobOp that this job decides."""
        return {
            "worker_pool_specs": [pool.to_api() for pool in self.pools],
            "strategy": self.scheduling.strategy,
            "timeout": f"{self.scheduling.timeout_seconds}s",
            "restart_job_on_worker_restart": self.scheduling.restart_job_on_worker_restart,
        }
