"""Follow a run to its end: task states from the job, progress from the structured lines of its tasks and replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf import json_format

from penstock_pipelines.errors import ServiceError
from penstock_pipelines.logs import LogLine, LogReader
from penstock_pipelines.submit import RUN_LABEL
from penstock_trainer.contract.events import EvaluationEvent, ProgressEvent, StepEvent, parse_event

logger = logging.getLogger(__name__)

TRAINING_TASK = "custom-training-job"
_POLL_SECONDS = 1.0
_LOG_SECONDS = 2.0
"""Cloud Logging's reading quota is small, and shared by everybody who looks at the project."""
_LONGEST_LOG_SECONDS = 60.0
FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass
class TaskView:
    """One task of a run as a person wants to see it."""

    name: str
    job_id: str = ""
    """Of the CustomJob that runs the task's container; its log lines are filed under it. Empty: from the cache."""
    state: str = "PENDING"
    seconds: float = 0.0
    """Since it started, up to its end."""
    error: str = ""
    event: StepEvent | ProgressEvent | None = None
    """The newest progress of it."""
    evaluation: EvaluationEvent | None = None
    """The newest score of what it trains."""

    @property
    def is_training(self) -> bool:
        """Whether it is GCPC's launcher of a CustomJob; kfp names the task after that component."""
        return self.name.startswith(TRAINING_TASK)


@dataclass
class RunView:
    """A run as it is now."""

    run_id: str
    state: str = "PENDING"
    error: str = ""
    tasks: dict[str, TaskView] = field(default_factory=dict)
    first_step: StepEvent | None = None
    last_step: StepEvent | None = None


class Display(Protocol):
    """Shows a run while it goes on. A Protocol because a terminal and a log file want different things."""

    def update(self, view: RunView) -> None:
        """Something may have changed."""


class Follower:
    """Watches one PipelineJob through the SDK's object."""

    def __init__(self, job: Any, *, project: str) -> None:
        self.view = RunView(job.name)
        self._job = job
        self._logs = LogReader(project)
        self._job_client: Any = None
        self._label = job.name
        self._started: Any = None
        self._ended: Any = None
        self._log_seconds = _LOG_SECONDS
        self._next_log_read = 0.0

    def follow(self, display: Display) -> RunView:
        """Block until the run has ended. KeyboardInterrupt passes through."""
        while True:
            self.refresh()
            display.update(self.view)
            if self.view.state in FINAL_STATES:
                return self.view
            time.sleep(_POLL_SECONDS)

    def cancel(self, display: Display) -> RunView:
        """Cancel the run and follow it until nothing of it is left."""
        self._job.cancel()
        return self.follow(display)

    def refresh(self) -> None:
        """Read the job, and what its tasks have logged. Raises ServiceError when the service does not show the job."""
        resource = self._resource()
        ended = _state_name(resource.state)
        self._label = resource.labels.get(RUN_LABEL, self.view.run_id)
        self._started, self._ended = resource.create_time, resource.end_time or None
        for detail in resource.job_detail.task_details:
            # The task of the whole pipeline, groups and loops have no container.
            if detail.executor_detail.container_detail.main_job or _state_name(detail.state) == "SKIPPED":
                self._update_task(detail)
        if ended in FINAL_STATES or time.monotonic() >= self._next_log_read:
            self._read_logs()
        # Set last: whoever sees the final state sees everything that led to it.
        self.view.state, self.view.error = ended, resource.error.message

    def custom_job(self) -> Any | None:
        """The run's training job as the API has it, or None while there is none."""
        found = list(self._training_jobs())
        return found[-1] if found else None

    def replica_lines(self, custom_job: Any) -> Iterator[LogLine]:
        """Everything that a training job's replicas wrote."""
        return self._logs.lines(custom_job.name.rpartition("/")[2])

    def outputs(self, task_name: str) -> dict[str, Any]:
        """Output parameters of a task by name, and metadata and `uri` of its output artifacts."""
        for detail in self._resource().job_detail.task_details:
            if detail.task_name == task_name:
                return _outputs(json_format.MessageToDict(type(detail).pb(detail)))
        return {}

    def _resource(self) -> Any:
        from google.api_core import exceptions

        try:
            return self._job.api_client.get_pipeline_job(name=self._job.resource_name)
        except exceptions.GoogleAPICallError as exc:
            raise ServiceError(f"the service does not show the run: {exc}") from exc

    def _update_task(self, detail: Any) -> None:
        task = self.view.tasks.setdefault(detail.task_name, TaskView(detail.task_name))
        task.state, task.error = _state_name(detail.state), detail.error.message
        task.job_id = detail.executor_detail.container_detail.main_job.rpartition("/")[2]
        if detail.start_time:
            end = detail.end_time.timestamp() if detail.end_time else time.time()
            task.seconds = max(0.0, end - detail.start_time.timestamp())

    def _read_logs(self) -> None:
        """Progress is a courtesy: when Cloud Logging does not answer, ask it less often and go on."""
        try:
            for task in self.view.tasks.values():
                if task.state == "RUNNING" and not task.is_training:
                    task.event = _newest_event(self._logs.new_lines(task.job_id)) or task.event
            self._read_training()
            self._log_seconds = _LOG_SECONDS
        except ServiceError as exc:
            self._log_seconds = min(2 * self._log_seconds, _LONGEST_LOG_SECONDS)
            logger.warning("%s; next try in %.0f s", exc, self._log_seconds)
        self._next_log_read = time.monotonic() + self._log_seconds

    def _read_training(self) -> None:
        for job in self._training_jobs():
            for line in self._logs.new_lines(job.name.rpartition("/")[2]):
                event = parse_event(line.payload)
                if isinstance(event, StepEvent):
                    self.view.first_step = self.view.first_step or event
                    self.view.last_step = event
                    for task in self.view.tasks.values():
                        if task.is_training:
                            task.event = event
                elif isinstance(event, EvaluationEvent):
                    for task in self.view.tasks.values():
                        if task.is_training:
                            task.evaluation = event

    def _training_jobs(self) -> Iterator[Any]:
        from google.cloud import aiplatform

        if self._job_client is None:
            endpoint = f"{self._job.location}-aiplatform.googleapis.com"
            self._job_client = aiplatform.gapic.JobServiceClient(client_options={"api_endpoint": endpoint})
        parent = self._job.resource_name.rpartition("/pipelineJobs/")[0]
        request = {"parent": parent, "filter": f'labels.{RUN_LABEL}="{self._label}"'}
        for job in reversed(list(self._job_client.list_custom_jobs(request=request))):
            # Runs of one schedule share their label; time tells them apart while they do not overlap.
            if self._started <= job.create_time and (self._ended is None or job.create_time <= self._ended):
                yield job


def failed_replica(custom_job: Any) -> str:
    """The error of a failed training job: which replica ended how, with its last lines."""
    return str(custom_job.error.message) if _state_name(custom_job.state) == "FAILED" else ""


def _outputs(detail: dict[str, Any]) -> dict[str, Any]:
    """Vertex keeps output parameters in the execution's metadata, under `output:` names."""
    metadata = detail.get("execution", {}).get("metadata", {})
    told = {
        name.removeprefix("output:"): value for name, value in metadata.items() if name.startswith("output:")
    }
    for name, group in detail.get("outputs", {}).items():
        artifact = group["artifacts"][0]
        told[name] = {**artifact.get("metadata", {}), "uri": artifact.get("uri", "")}
    return told


def _newest_event(lines: Iterator[LogLine]) -> StepEvent | ProgressEvent | None:
    newest = None
    for line in lines:
        event = parse_event(line.payload)
        if isinstance(event, (StepEvent, ProgressEvent)):
            newest = event
    return newest


def _state_name(state: Any) -> str:
    return str(state.name).removeprefix("PIPELINE_STATE_").removeprefix("JOB_STATE_")
