"""Which fields of a posted message mean something here. Any other field that is set is refused by its path.

A name stands for the field and all below it; lists are not numbered: `jobSpec.workerPoolSpecs.replicaCount`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from penstock_local.api.errors import UnimplementedError
from penstock_local.api.messages import raw

CUSTOM_JOB_FIELDS = frozenset(
    {
        "displayName",
        "labels",
        "jobSpec.baseOutputDirectory",
        "jobSpec.scheduling.disableRetries",
        "jobSpec.scheduling.restartJobOnWorkerRestart",
        "jobSpec.scheduling.timeout",
        "jobSpec.workerPoolSpecs.containerSpec",
        "jobSpec.workerPoolSpecs.machineSpec.acceleratorCount",
        "jobSpec.workerPoolSpecs.pythonPackageSpec",
        "jobSpec.workerPoolSpecs.replicaCount",
    }
)
PIPELINE_JOB_FIELDS = frozenset(
    {
        "displayName",
        "labels",
        "pipelineSpec",  # the orchestrator checks what is in it
        "runtimeConfig.failurePolicy",
        "runtimeConfig.gcsOutputDirectory",
        "runtimeConfig.parameterValues",
    }
)
SCHEDULE_FIELDS = frozenset(
    {
        "allowQueueing",
        "createPipelineJobRequest.parent",
        "cron",
        "displayName",
        "endTime",
        "maxConcurrentRunCount",
        "maxRunCount",
        "startTime",
        *(f"createPipelineJobRequest.pipelineJob.{name}" for name in PIPELINE_JOB_FIELDS),
    }
)

WITHOUT_EFFECT: Mapping[str, str] = {
    "jobSpec.scheduling.maxWaitDuration": "how long to wait for machines; processes have theirs at once",
    "jobSpec.scheduling.strategy": "how machines are had (STANDARD, SPOT, FLEX_START); faults are injected instead",
    "jobSpec.serviceAccount": "there is no IAM here",
    "jobSpec.workerPoolSpecs.diskSpec": "replicas share this machine's disk",
    "jobSpec.workerPoolSpecs.machineSpec.acceleratorType": "replicas get the devices that this machine has",
    "jobSpec.workerPoolSpecs.machineSpec.machineType": "every replica runs on this machine",
    "serviceAccount": "there is no IAM here",
    "createPipelineJobRequest.pipelineJob.serviceAccount": "there is no IAM here",
}
"""Accepted although nothing follows from them, and why: they say where a real job would run, not what it does."""

OUTPUT_ONLY = frozenset(
    {
        "create_time", "end_time", "error", "job_detail", "name", "satisfies_pzi", "satisfies_pzs", "schedule_name",
        "start_time", "state", "template_metadata", "update_time", "web_access_uris",
    }
)  # fmt: skip
"""Of CustomJob and PipelineJob: the service fills them in and, as AIP-203 asks, drops what a client wrote there."""
SCHEDULE_OUTPUT_ONLY = frozenset(
    {
        "catch_up", "create_time", "last_pause_time", "last_resume_time", "last_scheduled_run_response", "name",
        "next_run_time", "started_run_count", "state", "update_time",
    }
)  # fmt: skip


def drop_output_only(message: Any, names: Collection[str]) -> None:
    """Clear the fields that only the service writes."""
    for name in set(names) & set(raw(message).DESCRIPTOR.fields_by_name):
        raw(message).ClearField(name)


def refuse_unknown_fields(message: Any, path: str, honoured: Collection[str]) -> None:
    """Raise UnimplementedError for the first field that is set, not honoured and not in WITHOUT_EFFECT."""
    for field in _unknown(raw(message), "", path, {*honoured, *WITHOUT_EFFECT}):
        raise UnimplementedError(f"{field} cannot be honoured by the stand-in; leave it out for a local run.")


def _unknown(message: Any, name: str, path: str, known: Collection[str]) -> Iterator[str]:
    for descriptor, value in message.ListFields():
        field_name, field_path = f"{name}{descriptor.json_name}", f"{path}.{descriptor.json_name}"
        if field_name in known:
            continue
        if any(other.startswith(f"{field_name}.") for other in known):
            for index, item in enumerate(value if descriptor.is_repeated else [value]):
                item_path = f"{field_path}[{index}]" if descriptor.is_repeated else field_path
                yield from _unknown(item, f"{field_name}.", item_path, known)
        # GCPC's launcher sends empty messages for what its user left out.
        elif descriptor.message_type is None or descriptor.is_repeated or value.ByteSize():
            yield field_path
