"""When a job's machines are had, how long it runs, and what happens when one of them fails."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

from penstock_components.jobs.findings import Finding, Severity, quoted
from penstock_components.jobs.messages import (
    STRATEGIES,
    CustomJobSpec,
    MachineSpec,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.reduction_server import is_reduction_server
from penstock_components.jobs.roles import SERVERS
from penstock_components.jobs.rules.contents import filled_pools, num_nodes, on_persistent_resource
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.machines import accelerator_fault
from penstock_components.jobs.rules.rendezvous import rendezvous_of
from penstock_components.machines.catalogue import FLEX_START_ACCELERATORS, implied_accelerator, kind_of

LONGEST_TIMEOUT = timedelta(days=7)
_GCPC_MAX_WAIT = timedelta(days=1)
"""Default of CustomTrainingJobOp, which drops it unless the strategy is FLEX_START."""
_CANNOT_JOIN = "which a worker that was restarted alone cannot join: the others would wait for it until their collectives time out."
_HANGS: Mapping[Severity, str] = {
    "error": f"the nodes train as one group (NCCL group, where there are GPUs), {_CANNOT_JOIN}",
    "warning": f"GPUs of several nodes mostly train as one NCCL group, {_CANNOT_JOIN} Programs that do not wait for each other, "
    "as in batch inference, need nothing.",
}
_REPLACED = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Strategy, durations and restarts, and what they exclude."""
    scheduling = spec.scheduling or Scheduling()
    yield from _strategy(spec, scheduling, context)
    yield from _timeout(scheduling)
    yield from _max_wait(scheduling, context)
    if scheduling.strategy == "FLEX_START" and context.knows("scheduling.strategy"):
        yield from _flex_start(spec, context)
    yield from _restarts(spec, scheduling, context)


def _strategy(spec: CustomJobSpec, scheduling: Scheduling, context: Context) -> Iterator[Finding]:
    if scheduling.strategy in _REPLACED:
        yield Finding(
            path="scheduling.strategy",
            rule="strategy-deprecated",
            reason=f"{scheduling.strategy} is deprecated.",
            fix=f"Write {_REPLACED[scheduling.strategy]}.",
            severity="warning",
        )
    if scheduling.strategy and scheduling.strategy not in STRATEGIES:
        near = difflib.get_close_matches(scheduling.strategy, STRATEGIES, n=1)
        yield Finding(
            path="scheduling.strategy",
            rule="enum",
            reason=f"{quoted(scheduling.strategy)} is no strategy.",
            fix=f"Write {near[0] if near else 'STANDARD, SPOT or FLEX_START'}.",
        )
    is_held = on_persistent_resource(spec) and context.knows("persistent_resource_id")
    if scheduling.strategy == "SPOT" and is_held:
        yield Finding(
            path="scheduling.strategy",
            rule="spot-persistent-resource",
            reason="the machines of a persistent resource are held already; what SPOT means there is not documented.",
            fix="Leave the strategy out, or the persistent resource.",
            severity="warning",
        )


def _timeout(scheduling: Scheduling) -> Iterator[Finding]:
    timeout = scheduling.timeout
    if timeout is None or timedelta(0) < timeout <= LONGEST_TIMEOUT:
        return
    if timeout > LONGEST_TIMEOUT:
        reason = f"{_told(timeout)} is longer than a job may run, 7 days."
        fix = 'Write "604800s"; let a longer run resume from its checkpoint in another job.'
    else:
        reason, fix = f"{_told(timeout)} is no running time.", 'Write seconds, such as "86400s".'
    yield Finding(path="scheduling.timeout", rule="timeout", reason=reason, fix=fix)


def _max_wait(scheduling: Scheduling, context: Context) -> Iterator[Finding]:
    wait = scheduling.max_wait_duration
    if wait is None or (context.through_gcpc and wait == _GCPC_MAX_WAIT):
        return
    if scheduling.strategy != "FLEX_START" and context.knows("scheduling.strategy"):
        yield Finding(
            path="scheduling.max_wait_duration",
            rule="max-wait-strategy",
            reason=f"only FLEX_START waits for machines; the strategy is {scheduling.strategy or 'STANDARD'}.",
            fix="Remove it, or set scheduling.strategy to FLEX_START.",
        )
    elif wait < timedelta(0):
        yield Finding(
            path="scheduling.max_wait_duration",
            rule="max-wait",
            reason=f"{_told(wait)} is no time to wait.",
            fix='Write seconds, such as "86400s"; "0s" waits for ever.',
        )


def _flex_start(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """One kind of machine, of a GPU that Flex-start has, and no reservation. Reducers are told of by their own rule."""
    pools = [
        (path, pool.machine_spec or MachineSpec())
        for index, path, pool in filled_pools(spec)
        if not (index == SERVERS and (context.strategy or is_reduction_server(pool)))
    ]
    for path, machine in pools:
        affinity = machine.reservation_affinity
        if affinity is not None and affinity.reservation_affinity_type not in ("", "NO_RESERVATION"):
            yield Finding(
                path=f"{path}.machine_spec.reservation_affinity",
                rule="flex-start-reservation",
                reason="FLEX_START takes no machine out of a reservation.",
                fix="Remove reservation_affinity, or set the strategy to STANDARD.",
            )
    known = [(path, machine) for path, machine in pools if not _is_faulty(machine)]
    if not known:
        return
    at, first = known[0]
    for path, machine in known[1:]:
        if replace(machine, reservation_affinity=None) != replace(first, reservation_affinity=None):
            yield Finding(
                path=f"{path}.machine_spec",
                rule="flex-start-machines",
                reason=f"FLEX_START wants the same machines in all pools; {_machine(machine)} is not {_machine(first)} of {at}.",
                fix="Give every pool the same machine_spec, or set the strategy to STANDARD or SPOT.",
            )
            return
    yield from _flex_start_accelerator(f"{at}.machine_spec.machine_type", first)


def _is_faulty(machine: MachineSpec) -> bool:
    """Whether the rules about machines tell of this one already."""
    kind = kind_of(machine.machine_type)
    return kind is None or (kind != "tpu" and accelerator_fault("", machine) is not None)


def _flex_start_accelerator(path: str, machine: MachineSpec) -> Iterator[Finding]:
    implied = implied_accelerator(machine.machine_type)
    accelerator = implied[0] if implied else machine.accelerator_type
    if accelerator in FLEX_START_ACCELERATORS:
        return
    yield Finding(
        path=path,
        rule="flex-start-accelerator",
        reason=f"FLEX_START has no {accelerator or 'machines without GPUs'}.",
        fix=f"Take one of {', '.join(sorted(FLEX_START_ACCELERATORS))}, or set the strategy to STANDARD or SPOT.",
    )


def _restarts(spec: CustomJobSpec, scheduling: Scheduling, context: Context) -> Iterator[Finding]:
    if not context.knows("scheduling.restart_job_on_worker_restart", "scheduling.disable_retries"):
        return
    disables = scheduling.disable_retries and not context.through_gcpc  # the op does not carry it
    group = _group(spec, context)
    if disables and group is not None and (group == "error" or not scheduling.restart_job_on_worker_restart):
        yield Finding(
            path="scheduling.disable_retries",
            rule="disable-retries-group",
            reason=f"disable_retries sets restart_job_on_worker_restart to false, and {_HANGS[group]}",
            fix="Remove disable_retries and set restart_job_on_worker_restart to true.",
            severity=group,
        )
    elif disables and scheduling.restart_job_on_worker_restart:
        yield Finding(
            path="scheduling.disable_retries",
            rule="disable-retries-restart",
            reason="disable_retries sets restart_job_on_worker_restart to false, whatever is written there.",
            fix="Keep one of the two.",
        )
    elif not scheduling.restart_job_on_worker_restart and group is not None:
        yield Finding(
            path="scheduling.restart_job_on_worker_restart",
            rule="restart-job",
            reason=f"it is false, which is also the default, and {_HANGS[group]}",
            fix="Set it to true: the whole job starts again, and resumes from its checkpoint.",
            severity=group,
        )


def _group(spec: CustomJobSpec, context: Context) -> Severity | None:
    """How sure it is that several nodes hang when one of them is restarted alone; None for those that do not.

    Our trainer, a launcher that waits for a fixed number of nodes, and nodes whose gradients reducers sum surely hang.
    Other GPUs on several nodes most often are one group too, unless parameter servers stand between them. A launcher that
    takes nodes as they come never hangs.
    """
    if num_nodes(spec) < 2:
        return None
    rendezvous = rendezvous_of(spec)
    if context.strategy or rendezvous == "fixed":
        return "error"
    if rendezvous == "elastic":
        return None
    servers = [pool for pool in spec.worker_pool_specs[SERVERS : SERVERS + 1] if pool != WorkerPoolSpec()]
    has_reducers = any(is_reduction_server(pool) for pool in servers)
    machines = [pool.machine_spec or MachineSpec() for pool in spec.worker_pool_specs[:SERVERS]]
    has_gpus = any(
        machine.accelerator_type.startswith("NVIDIA") or implied_accelerator(machine.machine_type)
        for machine in machines
    )
    if not has_gpus or (servers and not has_reducers):
        return None
    return "error" if has_reducers else "warning"


def _machine(machine: MachineSpec) -> str:
    gpus = (
        f" with {machine.accelerator_count} x {machine.accelerator_type}" if machine.accelerator_type else ""
    )
    return f"{machine.machine_type or 'no machine'}{gpus}"


def _told(duration: timedelta) -> str:
    return f"{duration / timedelta(seconds=1):g} s"
