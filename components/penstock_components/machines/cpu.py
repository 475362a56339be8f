"""Machines without accelerators: for reducers, evaluators, parameter servers and small jobs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_components.machines.names import cpu_names, unknown_machine
from penstock_components.machines.tables import MachineError, tables


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuMachine:
    """One machine type, used without an accelerator."""

    machine_type: str
    vcpus: int
    network_gbps: float | None
    """Egress ceiling in Gbit/s; None where no first-hand source gives it."""


def is_cpu_machine(machine_type: str) -> bool:
    """Whether Vertex AI trains on it without an accelerator. N1 is among them; GPUs may be attached to it too."""
    return machine_type in cpu_names()


def cpu_machine(machine_type: str) -> CpuMachine:
    """The catalogue's row. Raises MachineError with the nearest CPU machine types."""
    if not is_cpu_machine(machine_type):
        raise MachineError(unknown_machine(machine_type, kind="CPU"))
    family, _, size = machine_type.split("-")
    vcpus = int(size)
    network = tables()["cpu_network"].get(family)
    known = network is not None and vcpus >= network["from_vcpus"]
    return CpuMachine(
        machine_type=machine_type, vcpus=vcpus, network_gbps=float(network["network_gbps"]) if known else None
    )
