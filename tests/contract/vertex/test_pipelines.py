"""Pipelines compiled by kfp and submitted by the SDK, with Google's own CustomTrainingJobOp in one of them."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from contract.vertex.stand_in import IMAGE, StandIn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
    from kfp import compiler, dsl

SUBMIT = """
import json, os, time
from google.api_core import exceptions
from google.cloud import aiplatform, storage

aiplatform.init(project="demo", location="us-central1")

def submit(template, **given):
    job = aiplatform.PipelineJob(
        display_name="p", template_path=template, pipeline_root="gs://test-bucket/runs", **given
    )
    job.submit()
    return job

def wait(job, *states):
    deadline = time.monotonic() + 40
    while job.state.name.rpartition("STATE_")[2] not in states:
        assert time.monotonic() < deadline, job.gca_resource
        time.sleep(0.1)

def tasks(job):
    return {detail.task_name: detail for detail in job.task_details}
"""


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def write(text: str, corpus: dsl.Output[dsl.Dataset]) -> int:
    with open(corpus.path, "w") as file:  # noqa: PTH123  # kfp's own way
        file.write(text)
    corpus.metadata["words"] = len(text.split())
    return len(text)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def read(corpus: dsl.Input[dsl.Dataset], length: int) -> str:
    with open(corpus.path) as file:  # noqa: PTH123
        return f"{file.read()} {length} {corpus.metadata['words']}"


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sleep() -> None:
    import time

    print("asleep", flush=True)
    time.sleep(60)


@dsl.component(base_image="gcr.io/acme/unknown:v1", install_kfp_package=False)
def unknown() -> None:
    pass


@dsl.pipeline(name="chain")
def chain(text: str = "a b c") -> None:
    written = write(text=text)
    read(corpus=written.outputs["corpus"], length=written.outputs["Output"])
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": {"image_uri": IMAGE, "command": ["python", "-c", "print('trained')"]},
    }
    CustomTrainingJobOp(display_name="train", worker_pool_specs=[pool])


@dsl.pipeline(name="long")
def long() -> None:
    sleep()


@dsl.pipeline(name="stranger")
def stranger() -> None:
    unknown()


def compiled(pipeline: Any, directory: Path) -> str:
    path = str(directory / "pipeline.yaml")
    compiler.Compiler().compile(pipeline, path)
    return path


def test_a_pipeline_passes_parameters_and_artifacts_and_trains(vertex: StandIn, tmp_path: Path) -> None:
    result = vertex.client(
        f"template = {compiled(chain, tmp_path)!r}\n{SUBMIT}"
        """
job = submit(template, parameter_values={"text": "one two"}, enable_caching=False)
wait(job, "SUCCEEDED", "FAILED")
details = tasks(job)
def told(name):
    return dict(details[name].execution.metadata)
uri = details["write"].outputs["corpus"].artifacts[0].uri
result = {
    "state": job.state.name,
    "error": str(job.gca_resource.error),
    "states": {name: detail.state.name for name, detail in details.items()},
    "length": told("write")["output:Output"],
    "read": told("read")["output:Output"],
    "object": storage.Client().bucket("test-bucket").blob(uri.removeprefix("gs://test-bucket/")).download_as_text(),
    "gcp_resources": json.loads(told("custom-training-job")["output:gcp_resources"]),
    "trained": [job.state.name for job in aiplatform.CustomJob.list(filter='display_name="train"')],
}
""",
    )
    assert result["state"] == "PIPELINE_STATE_SUCCEEDED", result
    assert {
        name: result["states"][name] for name in ("write", "read", "custom-training-job")
    } == dict.fromkeys(("write", "read", "custom-training-job"), "SUCCEEDED")
    assert result["length"] == 7
    assert result["read"] == "one two 7 2"
    assert result["object"] == "one two"
    assert "/customJobs/" in result["gcp_resources"]["resources"][0]["resourceUri"]
    assert result["trained"][-1] == "JOB_STATE_SUCCEEDED"


def test_a_pipeline_is_refused_cancelled_and_scheduled(vertex: StandIn, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    result = vertex.client(
        f"long, stranger = {compiled(long, tmp_path)!r}, {compiled(stranger, other)!r}\n{SUBMIT}"
        """
try:
    submit(stranger)
    refusal = ""
except exceptions.InvalidArgument as exc:
    refusal = exc.message

job = submit(long)
while tasks(job)["sleep"].state.name != "RUNNING":
    time.sleep(0.1)
job.cancel()
wait(job, "CANCELLED")

template = aiplatform.PipelineJob(display_name="p", template_path=long, pipeline_root="gs://test-bucket/runs")
schedule = template.create_schedule(cron="TZ=Europe/Berlin 0 3 * * 1", display_name="weekly", max_run_count=4)
names = [s.resource_name for s in aiplatform.PipelineJobSchedule.list(filter='display_name="weekly"')]
next_run = schedule.gca_resource.next_run_time.isoformat()
schedule.pause()
paused = aiplatform.PipelineJobSchedule.get(schedule.resource_name).state
schedule.resume(catch_up=False)
resumed = aiplatform.PipelineJobSchedule.get(schedule.resource_name).state
try:
    template.create_schedule(cron="99 * * * *", display_name="never")
    cron = ""
except exceptions.InvalidArgument as exc:
    cron = exc.message
listed = names == [schedule.resource_name]
schedule.delete()
result = {
    "refusal": refusal,
    "task": tasks(job)["sleep"].state.name,
    "next_run": next_run,
    "listed": listed,
    "states": [paused.name, resumed.name],
    "cron": cron,
    "left": len(aiplatform.PipelineJobSchedule.list()),
}
""",
    )
    assert "gcr.io/acme/unknown:v1" in result["refusal"]
    assert "exec-unknown" in result["refusal"]  # the path of the image in the spec
    assert result["task"] == "CANCELLED"
    assert result["next_run"].endswith(("T01:00:00+00:00", "T02:00:00+00:00"))
    assert result["listed"]
    assert result["states"] == ["PAUSED", "ACTIVE"]
    assert "'99 * * * *'" in result["cron"]
    assert result["left"] == 0


@pytest.mark.parametrize(
    ("job", "code", "told"),
    [
        ({"network": "x"}, 501, "pipelineJob.network"),
        ({"runtimeConfig": {"gcsOutputDirectory": "gs://nowhere/x"}}, 400, "gs://nowhere/x"),
        ({"runtimeConfig": {"gcsOutputDirectory": "gs://test-bucket/x"}}, 400, "pipelineSpec"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(rest: Any, job: dict[str, Any], code: int, told: str) -> None:
    status, message = rest.refusal("POST", "v1/projects/demo/locations/us-central1/pipelineJobs", job)
    assert status == code, message
    assert told in message
