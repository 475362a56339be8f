"""Which machines, how many, which engine: each combination with what it needs, or the reason why it cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.topology import Topology, nodes
from penstock_components.machines.catalogue import (
    MachineError,
    gpu_machine,
    gpu_machines,
    implied_accelerator,
    kind_of,
)
from penstock_components.planning.memory import RankMemory, rank_memory
from penstock_components.planning.shape import ModelShape
from penstock_components.planning.traffic import Collective, step_traffic
from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.contract.fields import ContractError

GB = 10**9
MACHINE_FORM = "TYPE or TYPE:ACCELERATOR:COUNT, such as n1-standard-16:NVIDIA_TESLA_T4:4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One combination."""

    machine: MachineSpec
    """With its accelerators."""
    num_nodes: int
    strategy: str
    world_size: int
    """Ranks: one for each accelerator. 0 where the machine has no GPU."""
    reason: str
    """Why it cannot be; empty where it can."""
    memory: RankMemory | None = None
    """Of rank 0. Under ZeRO another may hold slightly more: it depends on which parameters its range cuts."""
    memory_limit: int = 0
    """Bytes of an accelerator, without what is set aside; 0 where there is none."""
    traffic: tuple[Collective, ...] = ()
    """Of one optimizer step of one rank."""

    @property
    def is_feasible(self) -> bool:
        """Whether it fits."""
        return not self.reason

    @property
    def machine_name(self) -> str:
        """As `machine_named` reads it."""
        return machine_name(self.machine)


def machine_named(text: str) -> MachineSpec:
    """The machine of MACHINE_FORM, with the accelerators that go without saying.

    Raises MachineError for a text of another form, and for a machine or accelerators that do not exist.
    """
    if ":" not in text:
        return machine_spec(text)
    parts = re.fullmatch(r"([^:]+):([^:]+):([0-9]{1,4})", text)
    if parts is None:
        raise MachineError(f"machine {text!r} must be {MACHINE_FORM}.")
    return machine_spec(
        MachineSpec(machine_type=parts[1], accelerator_type=parts[2], accelerator_count=int(parts[3]))
    )


def machine_spec(machine: MachineSpec | str) -> MachineSpec:
    """The machine with the accelerators that go without saying. Raises MachineError for one that does not exist."""
    named = machine if isinstance(machine, MachineSpec) else MachineSpec(machine_type=machine)
    if kind_of(named.machine_type, named.accelerator_type) == "tpu":
        return named  # of which there is no plan, whatever its topology
    return nodes(machine, 1).machine


def machine_name(machine: MachineSpec) -> str:
    """Its type; with its accelerators, as TYPE:ACCELERATOR:COUNT, where the type has a choice."""
    if not machine.accelerator_type or implied_accelerator(machine.machine_type) is not None:
        return machine.machine_type
    return f"{machine.machine_type}:{machine.accelerator_type}:{machine.accelerator_count}"


def options(
    config: JobConfig,
    shape: ModelShape,
    *,
    machines: Sequence[MachineSpec | str],
    node_counts: Sequence[int],
    strategies: Sequence[Strategy],
    reserved_bytes: int,
) -> list[Option]:
    """Every combination, in that order. `reserved_bytes` of each accelerator are left for its driver and libraries.

    Raises MachineError for a machine that does not exist, JobSpecError for less than one node.
    """
    return [
        _option(config, shape, machine, count, strategy, reserved_bytes)
        for machine in [machine_spec(each) for each in machines]
        for count in node_counts
        for strategy in strategies
    ]


def _option(
    config: JobConfig,
    shape: ModelShape,
    machine: MachineSpec,
    num_nodes: int,
    strategy: Strategy,
    reserved_bytes: int,
) -> Option:
    refused = Option(machine=machine, num_nodes=num_nodes, strategy=strategy, world_size=0, reason="")
    if reason := _not_planned(machine):
        return replace(refused, reason=reason)
    topology = nodes(machine, num_nodes)
    capacity = _accelerator_bytes(topology)
    known = replace(refused, world_size=topology.world_size, memory_limit=max(0, capacity - reserved_bytes))
    if reserved_bytes >= capacity:
        reason = f"{reserved_bytes / GB:g} GB set aside leave nothing of its {capacity / GB:g} GB"
        return replace(known, reason=reason)
    try:
        planned = replace(config, engine=replace(config.engine, strategy=strategy))
        ranks, per_node = topology.world_size, topology.accelerators_per_node
        memory = rank_memory(planned, shape, world_size=ranks, ranks_per_node=per_node)
        traffic = step_traffic(planned, shape, world_size=ranks, ranks_per_node=per_node)
    except ContractError as exc:
        return replace(known, reason=str(exc))
    known = replace(known, memory=memory, traffic=traffic)
    return replace(known, reason=_too_large(memory, known.memory_limit))


def _not_planned(machine: MachineSpec) -> str:
    """Why a machine that exists is none for a plan; empty where it is."""
    if machine.gpu_partition_size:
        return f"it has a part of a GPU, {machine.gpu_partition_size}; the plan is of whole GPUs"
    if kind_of(machine.machine_type, machine.accelerator_type) == "gpu":
        return ""
    attached = [row.accelerator_type for row in gpu_machines() if row.machine_type == machine.machine_type]
    if not attached:
        return "it has no GPU; the plan is of GPUs"
    form = f"{machine.machine_type}:ACCELERATOR:COUNT"
    return f"it has no GPU unless one is attached; name it as {form}, with {' or '.join(attached)}"


def _accelerator_bytes(topology: Topology) -> int:
    """Memory of one GPU, in the decimal GB of its name."""
    machine = topology.machine
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
