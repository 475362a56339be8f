"""Machines and their accelerators, as the catalogue has them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import (
    CustomJobSpec,
    MachineSpec,
    Scheduling,
)
from penstock_components.jobs.nccl import mentions_setup, nccl_setup, settings_that_do_not_apply
from penstock_components.jobs.roles import SERVERS
from penstock_components.jobs.rules.contents import (
    filled_pools,
    is_placeholder,
    may_be_on_persistent_resource,
    num_nodes,
    programs,
)
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.regions import check_region
from penstock_components.jobs.rules.reservations import RESERVATION_KEY
from penstock_components.machines.catalogue import (
    GpuMachine,
    MachineError,
    catalogue_date,
    gpu_machine,
    gpu_machines,
    implied_accelerator,
    kind_of,
    nearest,
)

_GONE = {"NVIDIA_TESLA_K80": "NVIDIA_TESLA_T4 or NVIDIA_L4"}
"""Names that the API still has, and what to take instead."""


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Each pool's machine, accelerators and region, and what its variables say of its network."""
    for _, path, pool in filled_pools(spec):
        machine = pool.machine_spec or MachineSpec()
        yield from _machine(f"{path}.machine_spec", machine, spec, context)
    yield from _settings(spec)
    yield from _network_set_up(spec)


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
        if not may_be_on_persistent_resource(spec, context):
            yield Finding(
                path=f"{path}.machine_type",
                rule="required",
                reason="it is missing; a pool has no default machine.",
                fix="Name a machine type, such as n1-standard-8, or g2-standard-12 with 1 x NVIDIA_L4.",
            )
    elif kind is None:
        yield _unknown(f"{path}.machine_type", name)
    elif kind != "tpu":
        yield from _host(path, machine, spec, context)


def _settings(spec: CustomJobSpec) -> Iterator[Finding]:
    """Variables that this machine's network or the launcher has no use for."""
    is_distributed = sum(max(0, pool.replica_count) for pool in spec.worker_pool_specs) > 1
    for program in programs(spec):
        machine = program.pool.machine_spec or MachineSpec()
        yield from settings_that_do_not_apply(
            machine.machine_type, program.env, path=f"{program.path}.env", is_distributed=is_distributed
        )


def _network_set_up(spec: CustomJobSpec) -> Iterator[Finding]:
    """The script that a family's NCCL needs between nodes, where no word of the program speaks of it; told once."""
    if num_nodes(spec) < 2:
        return
    for program in programs(spec):
        machine = (program.pool.machine_spec or MachineSpec()).machine_type
        script = nccl_setup(machine).script
        texts = [*program.command, *program.args, *(variable.value for variable in program.env)]
        if program.index < SERVERS and script and not any(mentions_setup(text) for text in texts):
            is_package = program.pool.container_spec is None
            line = f"""["bash", "-c", 'source {script} && exec "$0" "$@"', <the program>]"""
            yield Finding(
                path=program.path,
                rule="network-set-up",
                reason=f"NCCL finds the network between machines of {machine} after {script} was sourced, and neither command "
                "nor args speak of that; what the image's entry point and its scripts do cannot be seen here.",
                fix=f"{'Give container_spec with' if is_package else 'Write'} command {line}, unless the program does it.",
                severity="warning",
            )
            return


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
    fault = accelerator_fault(path, machine)
    if fault is not None:
        yield fault
    elif machine.accelerator_type:
        row = next(
            each
            for each in gpu_machines()
            if (each.machine_type, each.accelerator_type) == (machine.machine_type, machine.accelerator_type)
        )
        yield from _availability(path, machine, row, spec, context)


def accelerator_fault(path: str, machine: MachineSpec) -> Finding | None:
    """What is wrong with the accelerators of a machine that is no TPU: one fault at most, since the others follow from it."""
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
            reason=f"gpu_partition_size {quoted(machine.gpu_partition_size)} goes with accelerator_count 1, not {count}.",
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
    yield from check_region(f"{path}.accelerator_type", row.accelerator_type, context)
    affinity = machine.reservation_affinity
    has_reservation = affinity is not None and affinity.reservation_affinity_type != "NO_RESERVATION"
    if has_reservation or may_be_on_persistent_resource(spec, context):
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
    elif (
        row.is_only_preemptible
        and strategy not in ("SPOT", "FLEX_START")
        and context.knows("scheduling.strategy")
    ):
        yield Finding(
            path=f"{path}.machine_type",
            rule="machine-consumption",
            reason=f"the strategy is {strategy or 'STANDARD'}; Compute Engine has {row.machine_type} only as Spot or Flex-start.",
            fix="Set scheduling.strategy to SPOT or FLEX_START.",
            severity="warning",
        )
