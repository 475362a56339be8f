"""A job as the arguments of GCPC's CustomTrainingJobOp (2.22), which carries less than the API takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_components.jobs.findings import Finding, JobSpecError
from penstock_components.jobs.messages import CustomJob, CustomJobSpec
from penstock_components.jobs.rules.identity import not_carried
from penstock_components.jobs.wire import duration_text, to_api


def to_gcpc(job: CustomJob) -> dict[str, Any]:
    """The arguments that make CustomTrainingJobOp create this job; those at the op's defaults are left out.

    Raises JobSpecError, which names each field that the op cannot carry, and empty pools: the op's launcher drops them, so
    that reducers would become workers.
    """
    spec = job.job_spec or CustomJobSpec()
    empty = [
        Finding(
            path=f"job_spec.worker_pool_specs[{index}]",
            rule="empty-pool-through-gcpc",
            reason="the pool is empty; CustomTrainingJobOp drops it, and the pools behind it move up by one.",
            fix="Give every pool before the last a replica, or send the job with the SDK.",
        )
        for index, pool in enumerate(spec.worker_pool_specs)
        if not to_api(pool)
    ]
    lost = [replace(finding, path=f"job_spec.{finding.path}") for finding in not_carried(spec)]
    refused = [*lost, *empty]
    if refused:
        raise JobSpecError(refused)
    scheduling = spec.scheduling
    told = {
        "display_name": job.display_name,
        "worker_pool_specs": [to_api(pool) for pool in spec.worker_pool_specs],
        "labels": dict(job.labels),
        "encryption_spec_key_name": job.encryption_spec.kms_key_name if job.encryption_spec else "",
        "network": spec.network,
        "reserved_ip_ranges": list(spec.reserved_ip_ranges),
        "psc_interface_config": to_api(spec.psc_interface_config) if spec.psc_interface_config else {},
        "persistent_resource_id": spec.persistent_resource_id,
        "service_account": spec.service_account,
        "tensorboard": spec.tensorboard,
        "enable_web_access": spec.enable_web_access,
        "base_output_directory": spec.base_output_directory.output_uri_prefix
        if spec.base_output_directory
        else "",
    }
    if scheduling is not None:
        told |= {
            "strategy": scheduling.strategy,
            "timeout": duration_text(scheduling.timeout) if scheduling.timeout is not None else "",
            "restart_job_on_worker_restart": scheduling.restart_job_on_worker_restart,
            "max_wait_duration": duration_text(scheduling.max_wait_duration)
            if scheduling.max_wait_duration is not None
            else "",
        }
    return {name: value for name, value in told.items() if value not in ("", [], {}, False)}
