"""TPU slices: one replica of one pool, whatever their size, in a topology that the machine type takes."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec, MachineSpec, Scheduling, WorkerPoolSpec
from penstock_components.jobs.rules.contents import filled_pools, is_placeholder
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.regions import check_region
from penstock_components.machines.catalogue import (
    MachineError,
    kind_of,
    legacy_tpu,
    legacy_tpus,
    tpu_machine,
)

_LONGEST_TOPOLOGY = 40  # of text that a message repeats


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Topologies, accelerator fields, Spot, and the one pool."""
    pools = list(filled_pools(spec))
    for _, path, pool in pools:
        machine = pool.machine_spec or MachineSpec()
        if kind_of(machine.machine_type) == "tpu" and not is_placeholder(machine.tpu_topology):
            yield from _tpu(f"{path}.machine_spec", machine, spec, context)
    yield from _tpu_pools(pools)


def _tpu(path: str, machine: MachineSpec, spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    if any(row.machine_type == machine.machine_type for row in legacy_tpus()):
        yield from _legacy_tpu(path, machine, spec, context)
        return
    if machine.accelerator_type or machine.accelerator_count:
        field = "accelerator_type" if machine.accelerator_type else "accelerator_count"
        yield Finding(
            path=f"{path}.{field}",
            rule="tpu-accelerator",
            reason=f"{machine.machine_type} is a TPU by its name and takes no accelerator_type or accelerator_count.",
            fix="Remove them and give tpu_topology.",
        )
    try:
        row = tpu_machine(machine.machine_type, machine.tpu_topology[:_LONGEST_TOPOLOGY])
    except MachineError as exc:
        yield Finding(
            path=f"{path}.tpu_topology", rule="tpu-topology", reason=str(exc), fix="Write one that it takes."
        )
        return
    yield from _no_spot_pod(f"{row.machine_type} in {row.tpu_topology}", row.is_pod, spec)
    yield from check_region(f"{path}.machine_type", row.machine_type, context)


def _legacy_tpu(path: str, machine: MachineSpec, spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    if machine.tpu_topology:
        yield Finding(
            path=f"{path}.tpu_topology",
            rule="tpu-topology",
            reason=f"{machine.machine_type} has no topology.",
            fix="Remove it and give accelerator_type TPU_V2 or TPU_V3 with accelerator_count.",
        )
        return
    try:
        row = legacy_tpu(machine.accelerator_type, machine.accelerator_count)
    except MachineError as exc:
        is_known = any(row.accelerator_type == machine.accelerator_type for row in legacy_tpus())
        yield Finding(
            path=f"{path}.{'accelerator_count' if is_known else 'accelerator_type'}",
            rule="accelerator-count" if is_known else "accelerator-type",
            reason=str(exc),
            fix="Write one that it takes.",
        )
        return
    is_pod = machine.accelerator_count >= row.smallest_pod_count
    yield from _no_spot_pod(f"{machine.accelerator_count} x {row.accelerator_type}", is_pod, spec)
    yield from check_region(f"{path}.accelerator_type", row.accelerator_type, context)


def _no_spot_pod(told: str, is_pod: bool, spec: CustomJobSpec) -> Iterator[Finding]:
    if is_pod and (spec.scheduling or Scheduling()).strategy == "SPOT":
        yield Finding(
            path="scheduling.strategy",
            rule="spot-tpu-pod",
            reason=f"{told} is a TPU Pod, and those are not had as Spot.",
            fix="Set the strategy to STANDARD, or take a slice of one machine.",
        )


def _tpu_pools(pools: list[tuple[int, str, WorkerPoolSpec]]) -> Iterator[Finding]:
    """A slice is one replica of one pool, whatever its size."""
    is_told = False
    for _, path, pool in pools:
        machine = pool.machine_spec or MachineSpec()
        if kind_of(machine.machine_type) != "tpu":
            continue
        if pool.replica_count != 1:
            yield Finding(
                path=f"{path}.replica_count",
                rule="tpu-replicas",
                reason=f"{pool.replica_count} replicas of {machine.machine_type}; a TPU slice is one replica.",
                fix="Set replica_count to 1; a larger slice is a larger tpu_topology (TPU_V2, TPU_V3: accelerator_count).",
            )
        if len(pools) > 1 and not is_told:
            is_told = True
            yield Finding(
                path=f"{path}.machine_spec.machine_type",
                rule="tpu-pools",
                reason=f"the job has {len(pools)} pools; one with TPUs has exactly one.",
                fix="Keep pool 0 alone; a larger slice is a larger tpu_topology (TPU_V2, TPU_V3: accelerator_count).",
            )
