"""A job as the arguments of GCPC's CustomTrainingJobOp (2.22), which carries less than the API takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import CustomJob, CustomJobSpec
from penstock_components.jobs.rules.contents import filled_pools
from penstock_components.jobs.rules.identity import not_carried
from penstock_components.jobs.rules.pools import dropped_pools
from penstock_components.jobs.wire import duration_text, to_api


def to_gcpc(job: CustomJob) -> dict[str, Any]:
    """The arguments that make CustomTrainingJobOp create this job; those at the op's defaults are left out.

    Raises JobSpecError, which names each field that the op cannot carry, and empty pools before others: the op's launcher
    drops them, so that reducers would become workers. Empty pools at the end are left out.
    """
    spec = job.job_spec or CustomJobSpec()
    found = (*not_carried(spec), *dropped_pools(spec))
    refused = [replace(finding, path=f"job_spec.{finding.path}") for finding in found]
    if refused:
        raise JobSpecError(refused)
    scheduling = spec.scheduling
    told = {
        "display_name": job.display_name,
        "worker_pool_specs": [to_api(pool) for _, _, pool in filled_pools(spec)],
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
