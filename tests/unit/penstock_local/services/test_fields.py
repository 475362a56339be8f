from __future__ import annotations

from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, PipelineJob, Schedule

from penstock_local.api.errors import UnimplementedError
from penstock_local.api.messages import from_json, raw
from penstock_local.services.fields import (
    CUSTOM_JOB_FIELDS,
    OUTPUT_ONLY,
    PIPELINE_JOB_FIELDS,
    SCHEDULE_FIELDS,
    SCHEDULE_OUTPUT_ONLY,
    WITHOUT_EFFECT,
    drop_output_only,
    refuse_unknown_fields,
)


def pool(**fields: Any) -> dict[str, Any]:
    return {"jobSpec": {"workerPoolSpecs": [{}, fields]}}


@pytest.mark.parametrize(
    ("posted", "path"),
    [
        ({"encryptionSpec": {"kmsKeyName": "k"}}, "encryptionSpec"),
        ({"jobSpec": {"network": "n"}}, "jobSpec.network"),
        ({"jobSpec": {"models": ["m"]}}, "jobSpec.models"),
        (pool(nfsMounts=[{"path": "/x"}]), "jobSpec.workerPoolSpecs[1].nfsMounts"),
        (pool(nfsMounts=[{}]), "jobSpec.workerPoolSpecs[1].nfsMounts"),
        (pool(machineSpec={"tpuTopology": "2x2"}), "jobSpec.workerPoolSpecs[1].machineSpec.tpuTopology"),
        (
            pool(machineSpec={"gpuPartitionSize": "1g"}),
            "jobSpec.workerPoolSpecs[1].machineSpec.gpuPartitionSize",
        ),
        (
            pool(machineSpec={"reservationAffinity": {"reservationAffinityType": "ANY_RESERVATION"}}),
            "jobSpec.workerPoolSpecs[1].machineSpec.reservationAffinity",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(posted: dict[str, Any], path: str) -> None:
    with pytest.raises(UnimplementedError) as caught:
        refuse_unknown_fields(from_json(CustomJob, posted), "customJob", CUSTOM_JOB_FIELDS)
    assert str(caught.value).startswith(f"customJob.{path} cannot be honoured")


@pytest.mark.parametrize(
    ("posted", "path"),
    [
        ({"runtimeConfig": {"parameters": {"a": {"intValue": "1"}}}}, "runtimeConfig.parameters"),
        ({"runtimeConfig": {"inputArtifacts": {"a": {"artifactId": "x"}}}}, "runtimeConfig.inputArtifacts"),
        ({"templateUri": "https://x"}, "templateUri"),
        ({"preflightValidations": True}, "preflightValidations"),
    ],
)
def test_the_same_holds_for_pipeline_jobs(posted: dict[str, Any], path: str) -> None:
    with pytest.raises(UnimplementedError, match=rf"^pipelineJob\.{path} cannot"):
        refuse_unknown_fields(from_json(PipelineJob, posted), "pipelineJob", PIPELINE_JOB_FIELDS)


def test_what_launchers_send_for_what_was_left_out_and_what_names_a_machine_is_accepted() -> None:
    machine = {"machineType": "a2-highgpu-1g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 1}
    container = {"imageUri": "i", "env": [{"name": "a", "value": "b"}]}
    pools = pool(
        machineSpec=machine, diskSpec={"bootDiskSizeGb": 100}, containerSpec=container, replicaCount="1"
    )
    scheduling = {
        "strategy": "SPOT",
        "maxWaitDuration": "86400s",
        "timeout": "604800s",
        "disableRetries": True,
    }
    spec = {**pools["jobSpec"], "scheduling": scheduling, "pscInterfaceConfig": {}, "serviceAccount": "s"}
    posted = {"displayName": "d", "labels": {"a": "b"}, "jobSpec": spec, "encryptionSpec": {"kmsKeyName": ""}}
    refuse_unknown_fields(from_json(CustomJob, posted), "customJob", CUSTOM_JOB_FIELDS)


def test_output_only_fields_of_a_client_are_dropped() -> None:
    job = CustomJob(
        name="n", display_name="d", state="JOB_STATE_FAILED", error={"code": 3}, web_access_uris={"a": "b"}
    )
    drop_output_only(job, OUTPUT_ONLY)
    assert job == CustomJob(display_name="d")


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (
            (CustomJob, PipelineJob, Schedule),
            CUSTOM_JOB_FIELDS | PIPELINE_JOB_FIELDS | SCHEDULE_FIELDS | set(WITHOUT_EFFECT),
        ),
        ((CustomJob, PipelineJob), OUTPUT_ONLY),
        ((Schedule,), SCHEDULE_OUTPUT_ONLY),
    ],
)
def test_every_name_is_that_of_a_field(kinds: tuple[Any, ...], names: set[str]) -> None:
    assert not [
        name for name in names if not any(_has(raw(kind()).DESCRIPTOR, name.split(".")) for kind in kinds)
    ]


def _has(descriptor: Any, names: list[str]) -> bool:
    for name in names:
        fields = {**descriptor.fields_by_name, **descriptor.fields_by_camelcase_name} if descriptor else {}
        if name not in fields:
            return False
        descriptor = fields[name].message_type
    return True
