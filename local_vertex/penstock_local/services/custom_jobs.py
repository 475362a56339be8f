"""google.cloud.aiplatform.v1.JobService, CustomJobs: checked when posted, run as processes, followed to the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob, JobState, job_service
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.rpc import code_pb2, status_pb2

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from penstock_local.api.messages import to_json
from penstock_local.faults.board import FaultBoard
from penstock_local.jobs.images import ImageMap, UnknownImageError
from penstock_local.jobs.processes import ProcessRecord
from penstock_local.jobs.replicas import MAX_POOLS
from penstock_local.jobs.runner import CustomJobRun, JobOutcome
from penstock_local.logs import LogStore
from penstock_local.services.fields import (
    CUSTOM_JOB_FIELDS,
    OUTPUT_ONLY,
    drop_output_only,
    refuse_unknown_fields,
)
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore, list_page, now
from penstock_local.services.running import RunningJobs
from penstock_local.storage import ObjectStore

logger = logging.getLogger(__name__)

FINAL_STATES = frozenset(
    {
        JobState.JOB_STATE_SUCCEEDED,
        JobState.JOB_STATE_FAILED,
        JobState.JOB_STATE_CANCELLED,
        JobState.JOB_STATE_EXPIRED,
    }
)
MOVES: Mapping[int, frozenset[int]] = {
    JobState.JOB_STATE_PENDING: frozenset(
        {
            JobState.JOB_STATE_RUNNING,
            JobState.JOB_STATE_CANCELLING,
            JobState.JOB_STATE_FAILED,
        }
    ),
    JobState.JOB_STATE_RUNNING: frozenset(
        {
            JobState.JOB_STATE_RUNNING,
            JobState.JOB_STATE_SUCCEEDED,
            JobState.JOB_STATE_FAILED,
            JobState.JOB_STATE_CANCELLING,
        }
    ),
    JobState.JOB_STATE_CANCELLING: frozenset({JobState.JOB_STATE_CANCELLED, JobState.JOB_STATE_FAILED}),
}
"""Allowed moves of a CustomJob; final states have none."""

# GCPC's launcher asks every 20 s. It sets no deadline, so its question is held until there is an answer.
_LAUNCHER_AGENT = "google-cloud-pipeline-components"
_LAUNCHER_HOLD_SECONDS = 300.0

JobValidator = Callable[[dict[str, Any]], Sequence[str]]
"""Findings for a CustomJob as REST JSON; handed in when the stand-in starts."""


@dataclass(frozen=True, kw_only=True)
class JobRuntime:
    """What every job of a stand-in runs with."""

    images: ImageMap
    logs: LogStore
    record: ProcessRecord
    objects: ObjectStore
    client_environment: Mapping[str, str]
    work_dir: Path
    faults: FaultBoard
    validator: JobValidator | None = None


@dataclass
class JobService:
    """CustomJobs of one stand-in."""

    store: ResourceStore
    place: Place
    runtime: JobRuntime
    _running: RunningJobs[CustomJobRun] = field(default_factory=RunningJobs)

    def create_custom_job(self, request: job_service.CreateCustomJobRequest, _: CallContext) -> CustomJob:
        """Check the job, keep it, and start it at once."""
        parent = self.place.parent(request.parent)
        job = CustomJob(request.custom_job)
        drop_output_only(job, OUTPUT_ONLY)
        self._check(job)
        job_id = self.store.next_id()
        job.name = f"{parent}/customJobs/{job_id}"
        job.state = JobState.JOB_STATE_PENDING
        job.create_time = job.update_time = now()
        run = CustomJobRun(
            job_id=job_id,
            spec=job.job_spec,
            images=self.runtime.images,
            logs=self.runtime.logs,
            record=self.runtime.record,
            objects=self.runtime.objects,
            client_environment=self.runtime.client_environment,
            project_number=self.place.project_number,
            work_dir=self.runtime.work_dir / job_id,
            faults=self.runtime.faults.for_job(job.name, dict(job.labels)),
        )
        self._running.start(
            job.name, run, insert=lambda: self.store.insert(job, parent=parent), follow=self._follow
        )
        return job

    def get_custom_job(self, request: job_service.GetCustomJobRequest, context: CallContext) -> CustomJob:
        """The job as it is; for GCPC's launcher, as it is when it has ended."""
        name = self.place.name(request.name)
        if _LAUNCHER_AGENT in context.user_agent:
            return self.store.wait_for(CustomJob, name, _is_final, _LAUNCHER_HOLD_SECONDS)
        return self.store.get(CustomJob, name)

    def list_custom_jobs(self, request: job_service.ListCustomJobsRequest, _: CallContext) -> Any:
        """Jobs of a location."""
        jobs = list(self.store.all(CustomJob, self.place.parent(request.parent)))
        page, token = list_page(jobs, request)
        return job_service.ListCustomJobsResponse(custom_jobs=page, next_page_token=token)

    def cancel_custom_job(
        self, request: job_service.CancelCustomJobRequest, _: CallContext
    ) -> empty_pb2.Empty:
        """Begin to cancel; the job is CANCELLED when its replicas are gone. Nothing happens to an ended job."""
        name = self.place.name(request.name)
        if not _is_final(self.store.get(CustomJob, name)):
            self._move(name, JobState.JOB_STATE_CANCELLING)
            run = self._running.get(name)
            if run is not None:
                run.cancel()
        return empty_pb2.Empty()

    def delete_custom_job(
        self, request: job_service.DeleteCustomJobRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Forget an ended job. Raises FailedPreconditionError for one that runs."""
        name = self.place.name(request.name)
        if not _is_final(self.store.get(CustomJob, name)):
            raise FailedPreconditionError(f"{name} has not ended; cancel it first.")
        self.store.delete(CustomJob, name)
        return done_operation(name, empty_pb2.Empty())

    def signal_replica(self, name: str, replica: str, number: int) -> None:
        """Send a signal to a replica of a running job. Raises NotFoundError when there is none of that name."""
        run = self._running.get(self.place.name(name))
        if run is None or not run.signal_replica(replica, number):
            raise NotFoundError(f"{name} has no running replica {replica!r}.")

    def fail_interrupted(self) -> None:
        """Close the jobs that were running when an earlier stand-in on this state ended."""
        outcome = JobOutcome(error="the stand-in ended while this job was running")
        for job in self.store.all(CustomJob):
            if not _is_final(job):
                self.store.update(CustomJob, job.name, lambda message: _close(message, outcome))

    def shut_down(self) -> None:
        """Cancel every job and wait until no replica is left."""
        self._running.shut_down(CustomJobRun.cancel)

    def _follow(self, name: str, run: CustomJobRun) -> None:
        try:
            outcome = run.run(_Listener(self, name))
        except Exception as exc:
            logger.exception("%s ended inside the stand-in", name)
            outcome = JobOutcome(error=f"the stand-in failed: {exc!r}")
        self.store.update(CustomJob, name, lambda job: _close(job, outcome))

    def move_to_running(self, name: str) -> None:
        """All replicas run."""
        self._move(name, JobState.JOB_STATE_RUNNING)

    def _move(self, name: str, state: JobState) -> None:
        def change(job: CustomJob) -> None:
            if state not in MOVES.get(job.state, frozenset()):
                return  # a cancel and an end crossed: the first one counts
            if state is JobState.JOB_STATE_RUNNING and not job.start_time:
                job.start_time = now()
            job.state, job.update_time = state, now()

        self.store.update(CustomJob, name, change)

    def _check(self, job: CustomJob) -> None:
        findings = self.runtime.validator(to_json(job)) if self.runtime.validator else ()
        if findings:
            raise InvalidArgumentError("\n".join(findings))
        if not job.display_name:
            raise InvalidArgumentError("customJob.displayName is empty; give the job a name.")
        if not job.job_spec.worker_pool_specs:
            raise InvalidArgumentError(
                "customJob.jobSpec.workerPoolSpecs is empty; give at least the primary's pool."
            )
        if len(job.job_spec.worker_pool_specs) > MAX_POOLS:
            raise InvalidArgumentError(
                f"customJob.jobSpec.workerPoolSpecs has {len(job.job_spec.worker_pool_specs)} pools; at most {MAX_POOLS} "
                "are allowed: primary, workers, reducers or parameter servers, evaluators."
            )
        refuse_unknown_fields(job, "customJob", CUSTOM_JOB_FIELDS)
        if job.job_spec.worker_pool_specs[0].replica_count != 1:
            count = job.job_spec.worker_pool_specs[0].replica_count
            raise InvalidArgumentError(
                f"customJob.jobSpec.workerPoolSpecs[0].replicaCount is {count}; the primary's pool has exactly 1 "
                "replica, further nodes go into pool 1."
            )
        for index, pool in enumerate(job.job_spec.worker_pool_specs):
            self._check_pool(f"customJob.jobSpec.workerPoolSpecs[{index}]", pool)

    def _check_pool(self, path: str, pool: Any) -> None:
        if pool.replica_count < 0:
            raise InvalidArgumentError(
                f"{path}.replicaCount is {pool.replica_count}; it must not be negative."
            )
        if not pool.replica_count:
            return  # an empty pool holds the place of one that the job does not use
        container, package = pool.container_spec, pool.python_package_spec
        field = "pythonPackageSpec.executorImageUri" if package else "containerSpec.imageUri"
        try:
            image = self.runtime.images.resolve(container.image_uri or package.executor_image_uri)
        except UnknownImageError as exc:
            raise InvalidArgumentError(f"{path}.{field}: {exc}") from exc
        if package:
            _check_package(f"{path}.pythonPackageSpec", package)
        elif not container.command and not image.entrypoint:
            raise InvalidArgumentError(
                f"{path}.containerSpec.command is empty and the image map gives {image.repository} no entrypoint."
            )


def _check_package(path: str, package: Any) -> None:
    uris = list(package.package_uris)
    if not uris or not all(uri.startswith("gs://") for uri in uris):
        raise InvalidArgumentError(f"{path}.packageUris is {uris}; give gs:// URIs of source distributions.")
    if not package.python_module:
        raise InvalidArgumentError(f"{path}.pythonModule is empty; name the module that is run.")


@dataclass(frozen=True, slots=True)
class _Listener:
    service: JobService
    name: str

    def running(self) -> None:
        self.service.move_to_running(self.name)


def done_operation(name: str, response: Any) -> operations_pb2.Operation:
    """A long-running operation that is over: clients take its response without asking again."""
    packed = any_pb2.Any()
    packed.Pack(response)
    return operations_pb2.Operation(name=f"{name}/operations/1", done=True, response=packed)


def _is_final(job: CustomJob) -> bool:
    return job.state in FINAL_STATES


def _close(job: CustomJob, outcome: JobOutcome) -> None:
    """Write a job's end into it."""
    if outcome.succeeded and job.state != JobState.JOB_STATE_CANCELLING:
        job.state = JobState.JOB_STATE_SUCCEEDED
    elif outcome.cancelled or job.state == JobState.JOB_STATE_CANCELLING:
        job.state = JobState.JOB_STATE_CANCELLED
    else:
        job.state = JobState.JOB_STATE_FAILED
        # GCPC's launcher takes INVALID_ARGUMENT as the user's error and DEADLINE_EXCEEDED as its own.
        code = code_pb2.DEADLINE_EXCEEDED if outcome.timed_out else code_pb2.INVALID_ARGUMENT
        job.error = status_pb2.Status(code=code, message=outcome.error)
    job.end_time = job.update_time = now()
