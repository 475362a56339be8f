"""PipelineService with real processes, below the wire."""

import datetime
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import PipelineJob, PipelineState, pipeline_service

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import UnimplementedError
from penstock_local.api.messages import from_json
from penstock_local.faults.board import FaultBoard
from penstock_local.jobs.images import ImageMap, LocalImage
from penstock_local.jobs.processes import ProcessRecord
from penstock_local.logs import LogStore
from penstock_local.services.custom_jobs import JobRuntime
from penstock_local.services.names import Place
from penstock_local.services.pipelines import FINAL_STATES, PipelineService
from penstock_local.services.resources import ResourceStore
from penstock_local.storage import ObjectStore
from penstock_local.tasks.executor import TASK_REPLICA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kfp import compiler, dsl

PARENT = "projects/demo/locations/us-central1"
WRITE = "mkdir -p $(dirname $0) && printf 'from %s' $1 > $0"


@dsl.container_component
def write(word: str, text: dsl.Output[dsl.Dataset]) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image="python", command=["sh", "-c", WRITE], args=[text.path, word])


@dsl.container_component
def show(text: dsl.Input[dsl.Dataset]) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image="python", command=["sh", "-c", "cat $0; echo"], args=[text.path])


@dsl.pipeline(name="paths")
def paths() -> None:
    written = write(word=dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER)
    show(text=written.outputs["text"])


class Bench:
    """A service, what it keeps, and one pipeline."""

    def __init__(self, directory: Path) -> None:
        self.logs = LogStore(directory / "logs")
        self.store = ResourceStore(directory / "db")
        self.objects = ObjectStore(directory / "objects")
        self.objects.create_bucket("bucket")
        runtime = JobRuntime(
            images=ImageMap({"python": LocalImage(repository="python", python=Path(sys.executable))}),
            logs=self.logs,
            record=ProcessRecord(directory / "processes"),
            objects=self.objects,
            client_environment={},
            work_dir=directory / "work",
            faults=FaultBoard(self.objects),
        )
        self.service = PipelineService(
            self.store, Place("demo", 42), runtime, objects=self.objects, work_dir=directory / "pipelines"
        )
        template = directory / "pipeline.yaml"
        compiler.Compiler().compile(paths, str(template))
        self.spec = next(yaml.safe_load_all(template.read_text()))

    def request(self, **fields: Any) -> pipeline_service.CreatePipelineJobRequest:
        runtime = {"gcsOutputDirectory": "gs://bucket/runs", **fields.pop("runtimeConfig", {})}
        job = from_json(PipelineJob, {"pipelineSpec": self.spec, "runtimeConfig": runtime, **fields})
        return pipeline_service.CreatePipelineJobRequest(parent=PARENT, pipeline_job=job)

    def ended(self, job: PipelineJob) -> PipelineJob:
        deadline = time.monotonic() + 20
        while (now := self.store.get(PipelineJob, job.name)).state not in FINAL_STATES:
            assert time.monotonic() < deadline, now
            time.sleep(0.05)
        return now

    def lines(self, job: PipelineJob, task_name: str) -> list[str]:
        [detail] = [detail for detail in job.job_detail.task_details if detail.task_name == task_name]
        main_job = detail.executor_detail.container_detail.main_job.rpartition("/")[2]
        assert main_job != str(detail.task_id)
        return self.logs.last_lines(job_id=main_job, task_name=TASK_REPLICA, count=10)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.service.shut_down()
    for store in (bench.logs, bench.store, bench.objects):
        store.close()


def test_containers_pass_artifacts_by_path_and_know_when_they_were_due(bench: Bench) -> None:
    due = datetime.datetime(2026, 3, 2, 12, 1, tzinfo=datetime.UTC)
    job = bench.ended(
        bench.service.create_scheduled_job(bench.request(), schedule_name="weekly", schedule_time=due)
    )
    assert job.state is PipelineState.PIPELINE_STATE_SUCCEEDED, job.error
    assert job.schedule_name == "weekly"
    assert bench.lines(job, "show") == ["from 2026-03-02T12:01:00Z"]
    [found] = bench.objects.list("bucket").objects
    assert bench.objects.read("bucket", found.name) == b"from 2026-03-02T12:01:00Z"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"network": "x"}, "network"),
        ({"preflightValidations": True}, "preflightValidations"),
        ({"runtimeConfig": {"parameters": {"a": {"intValue": "1"}}}}, "runtimeConfig.parameters"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(
    bench: Bench, fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(UnimplementedError, match=f"^pipelineJob.{path} cannot be honoured"):
        bench.service.create_pipeline_job(bench.request(**fields), CallContext(user_agent=""))
    assert list(bench.store.all(PipelineJob)) == []
