"""The Reduction Server of a job: what `reduction_server` advises, less what other rules have told already."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJobSpec,
    MachineSpec,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.reduction_server import advice
from penstock_components.jobs.roles import WORKERS
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import kind_of


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Place, image, machines and number of the reducers, and whether they are worth having."""
    found = advice(
        spec.worker_pool_specs,
        strategy=context.strategy,
        scheduling_strategy=(spec.scheduling or Scheduling()).strategy
        if context.knows("scheduling.strategy")
        else "",
        location=context.location,
    )
    for finding in found:
        if not _is_told(finding, spec, context):
            yield finding


def _is_told(finding: Finding, spec: CustomJobSpec, context: Context) -> bool:
    """Whether it follows from a fault of the pool itself: no nodes, no image, or a machine that does not exist."""
    pools = spec.worker_pool_specs
    if finding.rule == "reducers-nodes":
        return context.through_gcpc or pools[WORKERS] != WorkerPoolSpec()
    for index, pool in enumerate(pools):
        if finding.path.startswith(f"worker_pool_specs[{index}]."):
            machine, container = pool.machine_spec or MachineSpec(), pool.container_spec or ContainerSpec()
            if finding.rule == "reducers-image":
                return not container.image_uri
            return finding.rule == "reducers-machine" and kind_of(machine.machine_type) is None
    return False
