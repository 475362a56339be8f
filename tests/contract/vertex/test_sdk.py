"""The SDK as it is installed, in processes that have nothing but the stand-in's environment."""

from __future__ import annotations

from typing import Any

import pytest

from contract.vertex.stand_in import Rest, StandIn

# What each script begins with. {transport} is the argument of aiplatform.init that selects gRPC or REST.
PREAMBLE = """
import os, time
from google.api_core import exceptions
from google.cloud import aiplatform

TRANSPORT = "{transport}"
aiplatform.init(project="demo", location="us-central1", api_transport=TRANSPORT, staging_bucket="gs://test-bucket")

def pool(code):
    return {{
        "machine_spec": {{"machine_type": "n1-standard-4"}},
        "replica_count": 1,
        "container_spec": {{"image_uri": os.environ["TEST_IMAGE"], "command": ["python", "-c", code]}},
    }}

def wait(job, *states):
    while job.state.name.rpartition("STATE_")[2] not in states:
        time.sleep(0.1)
"""

CUSTOM_JOBS_START = """
label = f"sdk-{os.getpid()}"
sleep = "import time; time.sleep(60)"
pools = [pool("print('primary')"), pool(sleep), pool(sleep)]
done = aiplatform.CustomJob(display_name=label, worker_pool_specs=pools, labels={"part": "a"})
if TRANSPORT == "grpc":
    done.run(sync=False, restart_job_on_worker_restart=True)  # waits in a thread, 5 s at a time
else:
    done.submit(restart_job_on_worker_restart=True)
bad = aiplatform.CustomJob(display_name=label, worker_pool_specs=[pool("raise SystemExit('no data')")])
bad.submit()
stopped = aiplatform.CustomJob(display_name=label, worker_pool_specs=[pool(sleep)])
stopped.submit()
wait(stopped, "RUNNING")
stopped.cancel()
"""

CUSTOM_JOBS_END = """
wait(stopped, "CANCELLED")
wait(bad, "FAILED")
unknown = pool(sleep)
unknown["container_spec"]["image_uri"] = "gcr.io/acme/unknown:v1"
try:
    aiplatform.CustomJob(display_name="x", worker_pool_specs=[unknown]).submit()
    refusal = ""
except exceptions.BadRequest as exc:
    refusal = exc.message
done.wait() if TRANSPORT == "grpc" else wait(done, "SUCCEEDED")
again = aiplatform.CustomJob.get(done.resource_name)
listed = aiplatform.CustomJob.list(filter=f'display_name="{label}"', order_by="create_time")
custom_jobs = {
    "state": again.state.name,
    "commands": [list(p.container_spec.command) for p in again.gca_resource.job_spec.worker_pool_specs],
    "sent": [p["container_spec"]["command"] for p in pools],
    "error": bad.error.message,
    "refusal": refusal,
    "listed": [job.resource_name for job in listed],
    "created": [job.resource_name for job in (done, bad, stopped)],
}
"""

MODELS = """
image = os.environ["TEST_IMAGE"]
def upload(**given):
    return aiplatform.Model.upload(
        display_name="lm", artifact_uri="gs://test-bucket/model", serving_container_image_uri=image, **given
    )

first = upload(model_id=f"lm-{os.getpid()}", version_aliases=["challenger"], is_default_version=False)
second = upload(parent_model=first.resource_name, version_aliases=["challenger"], is_default_version=False)
registry = aiplatform.models.ModelRegistry(first.resource_name)
registry.add_version_aliases(["champion", "default"], "2")
registry.remove_version_aliases(["challenger"], "2")
versions = {info.version_id: sorted(info.version_aliases) for info in registry.list_versions()}
try:
    registry.delete_version("2")
    refusal = ""
except exceptions.BadRequest as exc:
    refusal = exc.message
registry.delete_version("1")
models = {
    "ids": [first.version_id, second.version_id],
    "versions": versions,
    "default": aiplatform.Model(first.resource_name).version_id,
    "champion": aiplatform.Model(first.resource_name + "@champion").version_id,
    "listed": [m.name for m in aiplatform.Model.list(filter='display_name="lm"')] == [first.name],
    "refusal": refusal,
    "left": [info.version_id for info in registry.list_versions()],
}
aiplatform.Model(first.resource_name).delete()
models["gone"] = [m.name for m in aiplatform.Model.list()]
"""


@pytest.fixture(scope="module", params=["grpc", "rest"])
def told(vertex: StandIn, request: pytest.FixtureRequest) -> Any:
    """What one process found out over one transport; the models are looked at while the jobs run."""
    parts = (PREAMBLE.format(transport=request.param), CUSTOM_JOBS_START, MODELS, CUSTOM_JOBS_END)
    return vertex.client("".join(parts) + "result = {'custom_jobs': custom_jobs, 'models': models}")


def test_custom_jobs_run_and_end_and_are_found_again(told: Any) -> None:
    result = told["custom_jobs"]
    assert result["state"] == "JOB_STATE_SUCCEEDED"
    assert result["commands"] == result["sent"]
    assert "exited with a non-zero status of 1" in result["error"]
    assert "no data" in result["error"]
    assert "customJob.jobSpec.workerPoolSpecs[0].containerSpec.imageUri" in result["refusal"]
    assert sorted(result["listed"]) == sorted(result["created"])  # `run` creates its job in a thread


def test_the_model_registry_moves_aliases_between_versions(told: Any) -> None:
    result = told["models"]
    refusal = result.pop("refusal")
    assert result == {
        "ids": ["1", "2"],
        "versions": {"1": [], "2": ["champion", "default"]},
        "default": "2",
        "champion": "2",
        "listed": True,
        "left": ["2"],
        "gone": [],
    }
    assert "is the default version" in refusal


def test_the_logging_client_reads_a_replicas_lines(vertex: StandIn, rest: Rest) -> None:
    code = "import json; print('plain'); print(json.dumps({'severity': 'WARNING', 'message': 'slow', 'loss': 2.5}))"
    pool = {
        "replicaCount": "1",
        "containerSpec": {"imageUri": vertex.environment["TEST_IMAGE"], "command": ["python", "-c", code]},
    }
    body = {"displayName": "a job", "jobSpec": {"workerPoolSpecs": [pool]}}
    name = rest.call("POST", "v1/projects/demo/locations/us-central1/customJobs", body)["name"]
    rest.wait_until(name, "SUCCEEDED")
    script = """
import google.cloud.logging
client = google.cloud.logging.Client()
def read(text, **more):
    wanted = f'resource.type="ml_job" AND resource.labels.job_id="{job_id}" {text}'
    return [entry.payload for entry in client.list_entries(filter_=wanted, **more)]
result = {
    "all": read(""),
    "paged": read("", page_size=1),
    "newest": read("", order_by=google.cloud.logging.DESCENDING, max_results=1),
    "warnings": read("severity>=WARNING"),
}
"""
    result = vertex.client(f"job_id = {name.rpartition('/')[2]!r}\n{script}")
    warning = {"message": "slow", "loss": 2.5}
    assert result == {
        "all": ["plain", warning],
        "paged": ["plain", warning],
        "newest": [warning],
        "warnings": [warning],
    }
