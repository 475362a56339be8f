"""google.cloud.aiplatform.v1.PipelineService: PipelineJobs, checked when posted and run by the orchestrator."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1.types import (
    PipelineFailurePolicy,
    PipelineJob,
    PipelineJobDetail,
    PipelineState,
    pipeline_service,
)
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.rpc import code_pb2, status_pb2

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)
from penstock_local.api.messages import to_json
from penstock_local.jobs.images import UnknownImageError
from penstock_local.orchestrator.artifact import Artifact
from penstock_local.orchestrator.cache import CachedOutputs
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.engine import FailurePolicy, PipelineRun, RunOutcome
from penstock_local.orchestrator.errors import SpecError, UnsupportedSpecError
from penstock_local.orchestrator.spec import Pipeline, load_pipeline
from penstock_local.orchestrator.state import TaskSnapshot, TaskState
from penstock_local.services.custom_jobs import JobRuntime, done_operation
from penstock_local.services.fields import (
    OUTPUT_ONLY,
    PIPELINE_JOB_FIELDS,
    drop_output_only,
    refuse_unknown_fields,
)
from penstock_local.services.names import Place, checked_job_id
from penstock_local.services.resources import ResourceStore, list_page, now
from penstock_local.services.running import RunningJobs
from penstock_local.services.task_details import task_detail
from penstock_local.storage import ObjectStore
from penstock_local.storage.errors import StorageError
from penstock_local.tasks.executor import ProcessExecutor

logger = logging.getLogger(__name__)

FINAL_STATES = frozenset(
    {
        PipelineState.PIPELINE_STATE_SUCCEEDED,
        PipelineState.PIPELINE_STATE_FAILED,
        PipelineState.PIPELINE_STATE_CANCELLED,
    }
)
_OUTCOMES = {
    TaskState.SUCCEEDED: PipelineState.PIPELINE_STATE_SUCCEEDED,
    TaskState.FAILED: PipelineState.PIPELINE_STATE_FAILED,
    TaskState.CANCELLED: PipelineState.PIPELINE_STATE_CANCELLED,
}


@dataclass
class PipelineService:
    """PipelineJobs of one stand-in."""

    store: ResourceStore
    place: Place
    runtime: JobRuntime
    objects: ObjectStore
    work_dir: Path
    _running: RunningJobs[PipelineRun] = field(default_factory=RunningJobs)

    def create_pipeline_job(
        self, request: pipeline_service.CreatePipelineJobRequest, _: CallContext
    ) -> PipelineJob:
        """Check the spec, its images and its parameters, keep the job, and start it at once."""
        return self._create(request)

    def create_scheduled_job(
        self,
        request: pipeline_service.CreatePipelineJobRequest,
        *,
        schedule_name: str,
        schedule_time: datetime.datetime,
    ) -> PipelineJob:
        """As create_pipeline_job, for a run that the schedule wanted to start at `schedule_time`."""
        return self._create(request, schedule_name=schedule_name, schedule_time=schedule_time)

    def _create(
        self,
        request: pipeline_service.CreatePipelineJobRequest,
        *,
        schedule_name: str = "",
        schedule_time: datetime.datetime | None = None,
    ) -> PipelineJob:
        parent = self.place.parent(request.parent)
        job = PipelineJob(request.pipeline_job)
        drop_output_only(job, OUTPUT_ONLY)
        pipeline, parameters = self._check(job)
        number = self.store.next_id()
        job_id = request.pipeline_job_id or f"{pipeline.name}-{now():%Y%m%d%H%M%S}-{number[-6:]}"
        job.name = f"{parent}/pipelineJobs/{checked_job_id(job_id)}"
        job.display_name = job.display_name or job_id
        job.schedule_name = schedule_name
        job.state = PipelineState.PIPELINE_STATE_RUNNING
        job.create_time = job.start_time = job.update_time = now()
        context = RunContext(
            resource_name=job.name,
            pipeline_job_uuid=number,
            project_id=self.place.project_id,
            project_number=str(self.place.project_number),
            location=job.name.split("/")[3],
            pipeline_root=job.runtime_config.gcs_output_directory.rstrip("/"),
            create_time=job.create_time,
            schedule_time=schedule_time,
            read_object=self._read_object,
        )
        self._start(job, context, pipeline, parameters)
        return job

    def get_pipeline_job(
        self, request: pipeline_service.GetPipelineJobRequest, _: CallContext
    ) -> PipelineJob:
        """The job with the details of its tasks."""
        return self.store.get(PipelineJob, self.place.name(request.name))

    def list_pipeline_jobs(self, request: pipeline_service.ListPipelineJobsRequest, _: CallContext) -> Any:
        """Jobs of a location."""
        jobs = list(self.store.all(PipelineJob, self.place.parent(request.parent)))
        page, token = list_page(jobs, request)
        return pipeline_service.ListPipelineJobsResponse(pipeline_jobs=page, next_page_token=token)

    def cancel_pipeline_job(
        self, request: pipeline_service.CancelPipelineJobRequest, _: CallContext
    ) -> empty_pb2.Empty:
        """Begin to cancel; exit tasks still run. Nothing happens to an ended job."""
        name = self.place.name(request.name)

        def change(job: PipelineJob) -> None:
            if job.state not in FINAL_STATES:
                job.state, job.update_time = PipelineState.PIPELINE_STATE_CANCELLING, now()

        self.store.update(PipelineJob, name, change)
        run = self._running.get(name)
        if run is not None:
            run.cancel()
        return empty_pb2.Empty()

    def delete_pipeline_job(
        self, request: pipeline_service.DeletePipelineJobRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Forget an ended job. Raises FailedPreconditionError for one that runs."""
        name = self.place.name(request.name)
        if self.store.get(PipelineJob, name).state not in FINAL_STATES:
            raise FailedPreconditionError(f"{name} has not ended; cancel it first.")
        self.store.delete(PipelineJob, name)
        return done_operation(name, empty_pb2.Empty())

    def running_of_schedule(self, schedule_name: str) -> int:
        """How many jobs of a schedule have not ended."""
        jobs = self.store.all(PipelineJob)
        return sum(job.schedule_name == schedule_name and job.state not in FINAL_STATES for job in jobs)

    def fail_interrupted(self) -> None:
        """Close the jobs that were running when an earlier stand-in on this state ended."""
        for job in self.store.all(PipelineJob):
            if job.state not in FINAL_STATES:
                self._close(
                    job.name,
                    PipelineState.PIPELINE_STATE_FAILED,
                    "the stand-in ended while this job was running",
                )

    def shut_down(self) -> None:
        """Cancel every job, exit tasks too, and wait until no task is left."""
        self._running.shut_down(lambda run: run.cancel(exit_tasks_too=True))

    def _check(self, posted: PipelineJob) -> tuple[Pipeline, dict[str, Any]]:
        refuse_unknown_fields(posted, "pipelineJob", PIPELINE_JOB_FIELDS)
        job = to_json(posted)
        runtime = job.get("runtimeConfig", {})
        self._check_root(runtime.get("gcsOutputDirectory", ""))
        try:
            pipeline = load_pipeline(job.get("pipelineSpec", {}))
            parameters = pipeline.resolve_parameters(runtime.get("parameterValues", {}))
            for path, image in pipeline.images():
                self._check_image(path, image)
        except UnsupportedSpecError as exc:
            raise UnimplementedError(str(exc)) from exc
        except SpecError as exc:
            raise InvalidArgumentError(str(exc)) from exc
        return pipeline, parameters

    def _check_root(self, root: str) -> None:
        bucket = root.removeprefix("gs://").partition("/")[0]
        if not root.startswith("gs://") or bucket not in {
            standing.name for standing in self.objects.list_buckets()
        }:
            raise InvalidArgumentError(
                f"pipelineJob.runtimeConfig.gcsOutputDirectory is {root!r}; give a gs:// URI in a bucket that exists."
            )

    def _check_image(self, path: str, image: str) -> None:
        try:
            self.runtime.images.resolve(image)
        except UnknownImageError as exc:
            raise InvalidArgumentError(f"{path}: {exc}") from exc

    def _read_object(self, uri: str) -> bytes:
        bucket, _, name = uri.removeprefix("gs://").partition("/")
        try:
            return self.objects.read(bucket, name)
        except StorageError as exc:
            raise OSError(str(exc)) from exc

    def _start(
        self, job: PipelineJob, context: RunContext, pipeline: Pipeline, parameters: dict[str, Any]
    ) -> None:
        run = PipelineRun(
            pipeline,
            context=context,
            parameters=parameters,
            executor=ProcessExecutor(
                self.runtime.images,
                self.runtime.logs,
                self.objects,
                self.runtime.record,
                {**self.runtime.client_environment, **_run_labels(job)},
            ),
            cache=_StoredCache(self.store),
            listener=_Listener(self.store, job.name),
            work_dir=self.work_dir / context.job_id,
            failure_policy=_failure_policy(job),
        )
        parent = job.name.rpartition("/pipelineJobs/")[0]
        self._running.start(
            job.name, run, insert=lambda: self.store.insert(job, parent=parent), follow=self._follow
        )

    def _follow(self, name: str, run: PipelineRun) -> None:
        try:
            outcome: RunOutcome | None = run.run()
        except Exception:
            logger.exception("%s ended inside the stand-in", name)
            outcome = None
        if outcome is None:
            self._close(
                name, PipelineState.PIPELINE_STATE_FAILED, "the stand-in failed; its log has the traceback"
            )
        else:
            self._close(name, _OUTCOMES[outcome.state], outcome.error.message if outcome.error else "")

    def _close(self, name: str, state: PipelineState, message: str) -> None:
        def change(job: PipelineJob) -> None:
            job.state = state
            job.end_time = job.update_time = now()
            if state is PipelineState.PIPELINE_STATE_FAILED:
                job.error = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message=message)

        self.store.update(PipelineJob, name, change)


@dataclass(frozen=True, slots=True)
class _Listener:
    """Keeps what the orchestrator tells in the job's resource."""

    store: ResourceStore
    job_name: str

    def task_changed(self, task: TaskSnapshot) -> None:
        location_name = self.job_name.rpartition("/pipelineJobs/")[0]
        detail = task_detail(task, location_name=location_name)

        def change(job: PipelineJob) -> None:
            details = [known for known in job.job_detail.task_details if known.task_id != task.task_id]
            job.job_detail = PipelineJobDetail(task_details=[*details, detail])
            job.update_time = now()

        self.store.update(PipelineJob, self.job_name, change)


@dataclass(frozen=True, slots=True)
class _StoredCache:
    """The orchestrator's Cache in the stand-in's database."""

    store: ResourceStore

    def get(self, key: str) -> CachedOutputs | None:
        text = self.store.get_text(key)
        if text is None:
            return None
        told = json.loads(text)
        artifacts = {
            name: tuple(Artifact(**artifact) for artifact in group)
            for name, group in told["artifacts"].items()
        }
        return CachedOutputs(parameters=told["parameters"], artifacts=artifacts)

    def put(self, key: str, outputs: CachedOutputs) -> None:
        artifacts = {
            name: [_plain(artifact) for artifact in group] for name, group in outputs.artifacts.items()
        }
        self.store.put_text(key, json.dumps({"parameters": dict(outputs.parameters), "artifacts": artifacts}))


def _plain(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "uri": artifact.uri,
        "schema_title": artifact.schema_title,
        "schema_version": artifact.schema_version,
        "metadata": dict(artifact.metadata),
    }


def _failure_policy(job: PipelineJob) -> FailurePolicy:
    fast = job.runtime_config.failure_policy == PipelineFailurePolicy.PIPELINE_FAILURE_POLICY_FAIL_FAST
    return FailurePolicy.FAST if fast else FailurePolicy.SLOW


def _run_labels(job: PipelineJob) -> Mapping[str, str]:
    """The run's labels as launchers find them; GCPC hands them on to the jobs that it creates."""
    return {"VERTEX_AI_PIPELINES_RUN_LABELS": json.dumps(dict(job.labels))}
