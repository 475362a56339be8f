"""Machines and their accelerators, as the catalogue has them; reservations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import (
    CustomJobSpec,
    MachineSpec,
    ReservationAffinity,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.nccl import settings_that_do_not_apply
from penstock_components.jobs.rules.contents import (
    filled_pools,
    is_placeholder,
    on_persistent_resource,
    programs,
    quoted,
)
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import (
    GpuMachine,
    MachineError,
    catalogue_date,
    gpu_machine,
    gpu_machines,
    implied_accelerator,
    kind_of,
    legacy_tpu,
    legacy_tpus,
    nearest,
    regions_of,
    tpu_machine,
)

RESERVATION_KEY = "compute.googleapis.com/reservation-name"
_RESERVATION = re.compile(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+")
_GONE = {"NVIDIA_TESLA_K80": "NVIDIA_TESLA_T4 or NVIDIA_L4"}
"""Names that the API still has, and what to take instead."""


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Each pool's machine, accelerators, reservation and region."""
    pools = list(filled_pools(spec))
    for _, path, pool in pools:
        machine = pool.machine_spec or MachineSpec()
        yield from _machine(f"{path}.machine_spec", machine, spec, context)
        yield from _reservation(f"{path}.machine_spec.reservation_affinity", machine, spec)
    yield from _tpu_pools(pools)
    yield from _settings(spec)


def _machine(path: str, machine: MachineSpec, spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    name = machine.machine_type
    for field, text in (("machine_type", name), ("tpu_topology", machine.tpu_topology)):
        if is_placeholder(text):
            yield Finding(
                path=f"{path}.{field}",
                rule="placeholder",
                reason=f"it is a placeholder of the pipeline, {quoted(text)}; machines are decided when the pipeline is compiled, "
                "because accelerators, number of processes, network settings and reducers follow from them.",
                fix="Give the name itself; make one pipeline for each machine.",
            )
            return
    kind = kind_of(name, machine.accelerator_type)
    if not name:
        if not on_persistent_resource(spec):
            yield Finding(
                path=f"{path}.machine_type",
                rule="required",
                reason="it is missing; a pool has no default machine.",
                fix="Name a machine type, such as n1-standard-8, or g2-standard-12 with 1 x NVIDIA_L4.",
            )
    elif kind is None:
        yield _unknown(f"{path}.machine_type", name)
    elif kind == "tpu":
        yield from _tpu(path, machine, spec, context)
    else:
        yield from _host(path, machine, spec, context)


def _settings(spec: CustomJobSpec) -> Iterator[Finding]:
    """Variables that this machine's network or the launcher has no use for."""
    is_distributed = sum(max(0, pool.replica_count) for pool in spec.worker_pool_specs) > 1
    for program in programs(spec):
        machine = program.pool.machine_spec or MachineSpec()
        yield from settings_that_do_not_apply(
            machine.machine_type, program.env, path=f"{program.path}.env", is_distributed=is_distributed
        )


def _unknown(path: str, name: str) -> Finding:
    near = nearest(name)
    return Finding(
        path=path,
        rule="machine-type",
        reason=f"{quoted(name)} is no machine type of Vertex AI training (catalogue of {catalogue_date()}).",
        fix=f"Did you mean {' or '.join(near)}?"
        if near
        else "Take one of training/configure-compute in Vertex AI's documentation.",
    )


def _host(path: str, machine: MachineSpec, spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Machines that have GPUs or nothing."""
    if machine.tpu_topology:
        yield Finding(
            path=f"{path}.tpu_topology",
            rule="tpu-topology",
            reason=f"{machine.machine_type} is no TPU.",
            fix="Remove it, or take a TPU machine such as ct5lp-hightpu-4t.",
        )
    fault = _accelerator_fault(path, machine)
    if fault is not None:
        yield fault
    elif machine.accelerator_type:
        row = next(
            each
            for each in gpu_machines()
            if (each.machine_type, each.accelerator_type) == (machine.machine_type, machine.accelerator_type)
        )
        yield from _availability(path, machine, row, spec, context)


def _accelerator_fault(path: str, machine: MachineSpec) -> Finding | None:
    """What is wrong with the accelerators: one fault at most, since the others follow from it."""
    name, kind, count = machine.machine_type, machine.accelerator_type, machine.accelerator_count
    implied = implied_accelerator(name)
    whole = f"Write accelerator_type {implied[0]} and accelerator_count {implied[1]}." if implied else ""
    if kind in _GONE:
        return Finding(
            path=f"{path}.accelerator_type",
            rule="accelerator-gone",
            reason=f"{kind} is not to be had any more.",
            fix=f"Take {_GONE[kind]}.",
        )
    if not kind and (implied or count or machine.gpu_partition_size):
        reason = (
            f"{name} always has {implied[1]} x {implied[0]}, and the API wants both named."
            if implied
            else "accelerator_count or gpu_partition_size is set, but no accelerator_type."
        )
        return Finding(
            path=f"{path}.accelerator_type",
            rule="accelerator-missing",
            reason=reason,
            fix=whole or "Name the accelerator, or remove the rest.",
        )
    if machine.gpu_partition_size and count != 1:
        return Finding(
            path=f"{path}.accelerator_count",
            rule="gpu-partition",
            reason=f"gpu_partition_size {machine.gpu_partition_size} goes with accelerator_count 1, not {count}.",
            fix="Write 1, or remove gpu_partition_size.",
        )
    if not kind:
        return None
    if count == 0 and _carries(name, kind):
        return Finding(
            path=f"{path}.accelerator_count",
            rule="accelerator-count",
            reason=f"it is missing beside {kind}.",
            fix=whole or "Write how many each replica has.",
        )
    return _pair_fault(path, machine, whole)


def _pair_fault(path: str, machine: MachineSpec, whole: str) -> Finding | None:
    name, kind, count = machine.machine_type, machine.accelerator_type, machine.accelerator_count
    if machine.gpu_partition_size and _carries(name, kind):
        return None  # a share of one of them, whatever number the machine has
    try:
        gpu_machine(name, kind, count)
    except MachineError as exc:
        is_carried = _carries(name, kind)
        return Finding(
            path=f"{path}.accelerator_count" if is_carried else f"{path}.accelerator_type",
            rule="accelerator-count" if is_carried else "accelerator-type",
            reason=str(exc),
            fix=whole or "Change the machine type or the accelerators.",
        )
    return None


def _carries(machine_type: str, accelerator_type: str) -> bool:
    return any(
        (row.machine_type, row.accelerator_type) == (machine_type, accelerator_type) for row in gpu_machines()
    )


def _availability(
    path: str, machine: MachineSpec, row: GpuMachine, spec: CustomJobSpec, context: Context
) -> Iterator[Finding]:
    """What is right, but ends soon, is elsewhere, or is not had this way."""
    if row.end_of_support:
        yield Finding(
            path=f"{path}.accelerator_type",
            rule="accelerator-end-of-support",
            reason=f"Google's end of support for {row.accelerator_type} is {row.end_of_support}.",
            fix="Take a newer one, such as NVIDIA_L4 (g2-standard-12).",
            severity="warning",
        )
    yield from _region(f"{path}.accelerator_type", row.accelerator_type, context)
    affinity = machine.reservation_affinity
    has_reservation = affinity is not None and affinity.reservation_affinity_type != "NO_RESERVATION"
    if has_reservation or on_persistent_resource(spec):
        return
    strategy = (spec.scheduling or Scheduling()).strategy
    if row.needs_reservation:
        yield Finding(
            path=f"{path}.reservation_affinity",
            rule="reservation-needed",
            reason=f"{row.machine_type} ({row.accelerator_type}) is only had out of a reservation.",
            fix=f"Write reservation_affinity: SPECIFIC_RESERVATION, key {RESERVATION_KEY}, values "
            "[projects/P/zones/Z/reservations/R].",
        )
    elif "no other way" in row.advised_consumption and strategy not in ("SPOT", "FLEX_START"):
        yield Finding(
            path=f"{path}.machine_type",
            rule="machine-consumption",
            reason=f"the strategy is {strategy or 'STANDARD'}; {row.machine_type} is to be had as {row.advised_consumption}.",
            fix="Set scheduling.strategy to SPOT or FLEX_START.",
            severity="warning",
        )


def _region(path: str, name: str, context: Context) -> Iterator[Finding]:
    regions = regions_of(name)
    if context.location and regions is not None and context.location not in regions:
        yield Finding(
            path=path,
            rule="region",
            reason=f"the quota page (catalogue of {catalogue_date()}) has no {name} in {context.location}.",
            fix=f"It has it in {', '.join(regions)}.",
            severity="warning",
        )


def _reservation(path: str, machine: MachineSpec, spec: CustomJobSpec) -> Iterator[Finding]:
    affinity = machine.reservation_affinity
    if affinity is None:
        return
    if on_persistent_resource(spec) and affinity.reservation_affinity_type != "NO_RESERVATION":
        yield Finding(
            path=path,
            rule="reservation-persistent-resource",
            reason="a persistent resource holds its machines already; a reservation does not go with it.",
            fix="Remove reservation_affinity, or persistent_resource_id.",
        )
    elif not affinity.reservation_affinity_type:
        meant = "SPECIFIC_RESERVATION" if affinity.values else "ANY_RESERVATION or NO_RESERVATION"
        yield Finding(
            path=f"{path}.reservation_affinity_type",
            rule="required",
            reason="it is missing.",
            fix=f"Write {meant}.",
        )
    elif affinity.reservation_affinity_type != "SPECIFIC_RESERVATION":
        if affinity.key or affinity.values:
            yield Finding(
                path=path,
                rule="reservation-named",
                reason=f"{affinity.reservation_affinity_type} names no reservation, but key or values are given.",
                fix="Write SPECIFIC_RESERVATION, or remove key and values.",
            )
    else:
        yield from _specific_reservation(path, affinity)


def _specific_reservation(path: str, affinity: ReservationAffinity) -> Iterator[Finding]:
    if affinity.key != RESERVATION_KEY and not is_placeholder(affinity.key):
        yield Finding(
            path=f"{path}.key",
            rule="reservation-key",
            reason=f"it is {quoted(affinity.key)}." if affinity.key else "it is missing.",
            fix=f"Write {RESERVATION_KEY}.",
        )
    form = "projects/<project>/zones/<zone>/reservations/<name>"
    if not affinity.values:
        yield Finding(
            path=f"{path}.values", rule="reservation-values", reason="there is none.", fix=f"Write [{form}]."
        )
    for index, value in enumerate(affinity.values):
        if not _RESERVATION.fullmatch(value) and not is_placeholder(value):
            yield Finding(
                path=f"{path}.values[{index}]",
                rule="reservation-values",
                reason=f"{quoted(value)} is not the full name of a reservation.",
                fix=f"Write {form}.",
            )


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
        row = tpu_machine(machine.machine_type, machine.tpu_topology)
    except MachineError as exc:
        yield Finding(
            path=f"{path}.tpu_topology", rule="tpu-topology", reason=str(exc), fix="Write one that it takes."
        )
        return
    yield from _no_spot_pod(f"{row.machine_type} in {row.tpu_topology}", row.is_pod, spec)
    yield from _region(f"{path}.machine_type", row.machine_type, context)


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
    yield from _region(f"{path}.accelerator_type", row.accelerator_type, context)


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
        if len(pools) > 1:
            yield Finding(
                path=f"{path}.machine_spec.machine_type",
                rule="tpu-pools",
                reason=f"the job has {len(pools)} pools; one with TPUs has exactly one.",
                fix="Keep pool 0 alone; a larger slice is a larger tpu_topology (TPU_V2, TPU_V3: accelerator_count).",
            )
            return
