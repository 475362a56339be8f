"""TPU slices: machine types with the topologies that each takes, and the older generations that count cores."""

from __future__ import annotations

import difflib
import functools
import math
from dataclasses import dataclass

from penstock_components.machines.names import unknown_machine
from penstock_components.machines.tables import MachineError, tables


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuMachine:
    """One machine type in one topology; a job has one pool of it with replica_count 1, however many VMs the slice has."""

    machine_type: str
    tpu_topology: str
    generation: str
    """v5e, v6e or 7x."""
    chips: int
    vms: int
    vcpus_per_vm: int
    memory_gb_per_vm: float

    @property
    def is_pod(self) -> bool:
        """Whether the slice has several VMs; such slices are not to be had on Spot."""
        return self.vms > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyTpu:
    """TPU v2 or v3: machine type cloud-tpu with an accelerator type and a count of cores."""

    machine_type: str
    accelerator_type: str
    single_count: int
    """Cores of one device."""
    smallest_pod_count: int
    pod_count_multiple: int
    """Of which a pod's count must be a multiple; 1 where none is documented."""

    def takes(self, accelerator_count: int) -> bool:
        """Whether it is to be had with so many cores."""
        is_pod = accelerator_count >= self.smallest_pod_count
        return accelerator_count == self.single_count or (
            is_pod and accelerator_count % self.pod_count_multiple == 0
        )


@functools.cache
def tpu_machines() -> tuple[TpuMachine, ...]:
    """Every machine type in every topology that it takes, in the file's order."""
    return tuple(
        TpuMachine(
            machine_type=row["machine_type"],
            tpu_topology=topology,
            generation=row["generation"],
            chips=_chips(topology),
            vms=_chips(topology) // row["chips_per_vm"],
            vcpus_per_vm=row["vcpus_per_vm"],
            memory_gb_per_vm=row["memory_gb_per_vm"],
        )
        for row in tables()["tpu_machines"]
        for topology in row["tpu_topologies"]
    )


@functools.cache
def legacy_tpus() -> tuple[LegacyTpu, ...]:
    """TPU v2 and v3."""
    return tuple(LegacyTpu(**row) for row in tables()["legacy_tpus"])


def tpu_machine(machine_type: str, tpu_topology: str) -> TpuMachine:
    """The catalogue's row of a v5e, v6e or 7x slice.

    Raises MachineError, which names the topologies that the machine type takes or the machine type that was meant.
    """
    rows = [row for row in tpu_machines() if row.machine_type == machine_type]
    for row in rows:
        if row.tpu_topology == tpu_topology:
            return row
    if not rows:
        if any(row.machine_type == machine_type for row in legacy_tpus()):
            kinds = " or ".join(row.accelerator_type for row in legacy_tpus())
            raise MachineError(
                f"{machine_type} has no tpu_topology: it takes accelerator_type {kinds} with accelerator_count."
            )
        raise MachineError(unknown_machine(machine_type, kind="TPU"))
    others = sorted({row.machine_type for row in tpu_machines() if row.tpu_topology == tpu_topology})
    family = [other for other in others if other.split("-")[0] == machine_type.split("-")[0]]
    advice = f" {tpu_topology} is a topology of {' and '.join(family or others)}." if others else ""
    given = f"tpu_topology {tpu_topology!r}" if tpu_topology else "no tpu_topology"
    raise MachineError(
        f"{machine_type} with {given} does not exist. It takes {', '.join(row.tpu_topology for row in rows)}.{advice}"
    )


def legacy_tpu(accelerator_type: str, accelerator_count: int) -> LegacyTpu:
    """TPU v2 or v3 with so many cores. Raises MachineError, which names the counts it takes."""
    row = next((row for row in legacy_tpus() if row.accelerator_type == accelerator_type), None)
    if row is None:
        known = [each.accelerator_type for each in legacy_tpus()]
        close = difflib.get_close_matches(accelerator_type, known, n=1)
        raise MachineError(
            f"cloud-tpu does not carry {accelerator_type!r}. It carries {' or '.join(close or known)}; newer TPUs have "
            "their own machine types and a tpu_topology."
        )
    if row.takes(accelerator_count):
        return row
    pods = (
        f"a multiple of {row.pod_count_multiple}"
        if row.pod_count_multiple > 1
        else f"{row.smallest_pod_count} or more"
    )
    raise MachineError(
        f"cloud-tpu does not come with {accelerator_count} x {accelerator_type}. It takes {row.single_count}, or {pods} "
        "for a pod."
    )


def _chips(topology: str) -> int:
    return math.prod(int(side) for side in topology.split("x"))
