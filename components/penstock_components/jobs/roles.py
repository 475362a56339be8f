"""Pools by their place, and those that asynchronous training adds: parameter servers and evaluators.

A pool's place among the pools is its role. TensorFlow reads it from TF_CONFIG, which Vertex AI sets in jobs of more than
one replica: pool 2 is `ps`, and pool 3 is `evaluator` as a task but no part of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_components.jobs.findings import Finding, require
from penstock_components.jobs.messages import ContainerSpec, MachineSpec, PythonPackageSpec, WorkerPoolSpec
from penstock_components.jobs.topology import nodes

PRIMARY, WORKERS, SERVERS, EVALUATORS = range(4)
"""Index of each pool. The nodes that train are 0 and 1; parameter servers and reducers have the same place."""
ROLE_NAMES = ("primary", "workers", "parameter servers or Reduction Server", "evaluators")
"""By index of the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServers:
    """Replicas that hold the parameters which workers read and update at their own pace. For programs that know of
    them, as TensorFlow's ParameterServerStrategy does; ranks of torch.distributed have no use for them."""

    machine: MachineSpec | str
    """A machine type alone where it takes one kind of accelerator only."""
    replica_count: int
    container: ContainerSpec | PythonPackageSpec
    """What each runs; most often the workers' program, which finds its role in TF_CONFIG."""

    def __post_init__(self) -> None:
        _require_replicas("parameter servers", SERVERS, self.replica_count)

    def pool(self) -> WorkerPoolSpec:
        """The pool for index 2. Raises MachineError for a machine type that does not exist."""
        return _pool(self.machine, self.replica_count, self.container)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluators:
    """Replicas that judge checkpoints while the others train, and take no part in that."""

    machine: MachineSpec | str
    """As of ParameterServers."""
    container: ContainerSpec | PythonPackageSpec
    replica_count: int = 1

    def __post_init__(self) -> None:
        _require_replicas("evaluators", EVALUATORS, self.replica_count)

    def pool(self) -> WorkerPoolSpec:
        """The pool for index 3. Raises as ParameterServers.pool does."""
        return _pool(self.machine, self.replica_count, self.container)


def later_pools(
    *,
    reducers: WorkerPoolSpec | None = None,
    parameter_servers: ParameterServers | None = None,
    evaluators: Evaluators | None = None,
) -> tuple[WorkerPoolSpec, ...]:
    """The pools from index 2 on; an empty one holds the place of pool 2 where only pool 3 is used.

    Raises JobSpecError for parameter servers beside reducers.
    """
    if reducers is not None and parameter_servers is not None:
        _refuse(
            SERVERS,
            "pool-2-taken",
            "a Reduction Server and parameter servers were given, and both are pool 2.",
            "Keep one: reducers sum the gradients of synchronous NCCL workers, parameter servers are for asynchronous ones.",
        )
    third = parameter_servers.pool() if parameter_servers else reducers
    if evaluators is not None:
        return (third or WorkerPoolSpec(), evaluators.pool())
    return (third,) if third else ()


def _pool(
    machine: MachineSpec | str, replica_count: int, container: ContainerSpec | PythonPackageSpec
) -> WorkerPoolSpec:
    if isinstance(machine, str):
        machine = nodes(machine, 1).machine
    if isinstance(container, PythonPackageSpec):
        return WorkerPoolSpec(
            machine_spec=machine, replica_count=replica_count, python_package_spec=container
        )
    return WorkerPoolSpec(machine_spec=machine, replica_count=replica_count, container_spec=container)


def _require_replicas(role: str, index: int, count: int) -> None:
    if type(count) is not int:
        is_later = "{{" in str(count)  # as kfp writes a pipeline parameter
        _refuse(
            index,
            "placeholder" if is_later else "python-type",
            f"the number of {role} is {count!s}, which is known only when the pipeline runs."
            if is_later
            else f"the number of {role} is {count!r}, of type {type(count).__name__}.",
            "Give an int: machines and their number are decided when the pipeline is compiled.",
        )
    elif count < 1:
        _refuse(index, "replica-count", f"there are {count} {role}.", "Give 1 or more, or leave them out.")


def _refuse(index: int, rule: str, reason: str, fix: str) -> None:
    require([Finding(path=f"worker_pool_specs[{index}]", rule=rule, reason=reason, fix=fix)])
