"""A stand-in that was started with our validator refuses a job at create, with the words of `penstock check`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from contract.vertex.stand_in import IMAGE, Rest, StandIn, start
from penstock_components.jobs.check import check_document

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
GOOD: dict[str, Any] = {
    "displayName": "a job",
    "jobSpec": {
        "workerPoolSpecs": [
            {
                "machineSpec": {"machineType": "n1-standard-4"},
                "replicaCount": "1",
                "containerSpec": {"imageUri": IMAGE, "command": ["python", "-c", "pass"]},
            }
        ]
    },
}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    validator = "penstock_components.jobs.check:refusals"
    stand_in = start(tmp_path_factory.mktemp("strict"), "--job-validator", validator)
    yield stand_in
    assert stand_in.stop() == 0, stand_in.log.read_text()


@pytest.fixture
def rest(strict: StandIn) -> Iterator[Rest]:
    client = Rest(strict)
    yield client
    client.close()


def bad() -> dict[str, Any]:
    job = copy.deepcopy(GOOD)
    pool = job["jobSpec"]["workerPoolSpecs"][0]
    pool["replicaCount"] = "2"
    pool["machineSpec"] = {
        "machineType": "n1-standard-16",
        "acceleratorType": "NVIDIA_TESLA_A100",
        "acceleratorCount": 8,
    }
    job["jobSpec"]["scheduling"] = {"timeout": "700000s"}
    return job


def test_a_good_job_is_taken(rest: Rest) -> None:
    assert "/customJobs/" in rest.call("POST", JOBS, GOOD)["name"]


def test_a_bad_one_is_refused_with_every_error_as_check_words_it(rest: Rest) -> None:
    code, message = rest.refusal("POST", JOBS, bad())
    errors = [each.told() for each in check_document(bad()).findings if each.severity == "error"]
    assert code == 400
    assert len(errors) >= 3
    assert message.splitlines() == errors


def test_the_stock_client_gets_the_same_words(strict: StandIn) -> None:
    script = f"""
from google.api_core import exceptions
from google.cloud import aiplatform_v1
import json
client = aiplatform_v1.JobServiceClient(client_options={{"api_endpoint": "us-central1-aiplatform.googleapis.com"}})
try:
    client.create_custom_job(
        parent="projects/demo/locations/us-central1",
        custom_job=aiplatform_v1.CustomJob.from_json(json.dumps({bad()!r})),
    )
except exceptions.InvalidArgument as exc:
    result = exc.message
"""
    errors = [each.told() for each in check_document(bad()).findings if each.severity == "error"]
    assert strict.client(script).splitlines() == errors
