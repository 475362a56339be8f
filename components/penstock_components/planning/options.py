"""Which machines, how many, which engine: each combination with what it needs, or the reason why it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.topology import Topology, nodes
from penstock_components.machines.catalogue import MachineError, gpu_machine
from penstock_components.planning.memory import RankMemory, rank_memory
from penstock_components.planning.shape import ModelShape
from penstock_components.planning.traffic import Collective, step_traffic
from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.contract.fields import ContractError

GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One combination."""

    machine_type: str
    num_nodes: int
    strategy: str
    world_size: int
    """Ranks: one for each accelerator. 0 where the machine is none."""
    reason: str
    """Why it cannot be; empty where it can."""
    memory: RankMemory | None = None
    """Of the rank that holds most."""
    memory_limit: int = 0
    """Bytes of an accelerator, without what is set aside."""
    traffic: tuple[Collective, ...] = ()
    """Of one optimizer step of one rank."""

    @property
    def is_feasible(self) -> bool:
        """Whether it fits."""
        return not self.reason


def options(
    config: JobConfig,
    shape: ModelShape,
    *,
    machines: Sequence[MachineSpec | str],
    node_counts: Sequence[int],
    strategies: Sequence[Strategy],
    reserved_bytes: int,
) -> list[Option]:
    """Every combination, in that order. `reserved_bytes` of each accelerator are left for its driver and libraries."""
    return [
        _option(config, shape, machine, count, strategy, reserved_bytes)
        for machine in machines
        for count in node_counts
        for strategy in strategies
    ]


def _option(
    config: JobConfig,
    shape: ModelShape,
    machine: MachineSpec | str,
    num_nodes: int,
    strategy: Strategy,
    reserved_bytes: int,
) -> Option:
    name = machine if isinstance(machine, str) else machine.machine_type
    refused = Option(machine_type=name, num_nodes=num_nodes, strategy=strategy, world_size=0, reason="")
    try:
        topology = nodes(machine, num_nodes)
        capacity = _accelerator_bytes(topology)
    except (MachineError, JobSpecError) as exc:
        return replace(refused, reason=str(exc))
    known = replace(refused, world_size=topology.world_size)
    if capacity is None:
        return replace(known, reason="it has no GPU; the plan is of GPUs")
    known = replace(known, memory_limit=capacity - reserved_bytes)
    try:
        planned = replace(config, engine=replace(config.engine, strategy=strategy))
        ranks, per_node = topology.world_size, topology.accelerators_per_node
        memory = rank_memory(planned, shape, world_size=ranks, ranks_per_node=per_node)
        traffic = step_traffic(planned, shape, world_size=ranks, ranks_per_node=per_node)
        known = replace(known, memory=memory, traffic=traffic)
    except ContractError as exc:
        return replace(known, reason=str(exc))
    return replace(known, reason=_too_large(memory, known.memory_limit))


def _accelerator_bytes(topology: Topology) -> int | None:
    """Memory of one GPU, in the decimal GB of its name; None for machines without."""
    machine = topology.machine
    if not machine.accelerator_type or machine.accelerator_type.startswith("TPU"):
        return None
    row = gpu_machine(machine.machine_type, machine.accelerator_type, machine.accelerator_count)
    return row.gpu_memory_gb * GB


def _too_large(memory: RankMemory, limit: int) -> str:
    """Why it does not fit, with the parts that take most; empty where it does."""
    if memory.device <= limit:
        return ""
    parts = asdict(memory.peak or memory.states.device)
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    told = ", ".join(f"{name} {parts[name] / GB:.1f}" for name in largest)
    return f"a rank needs {memory.device / GB:.1f} GB of {limit / GB:.1f}: {told}"
