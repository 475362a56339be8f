"""A task of the orchestrator as PipelineTaskDetail, the form in which the console and the SDK read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.cloud.aiplatform_v1.types import (
    Artifact,
    Execution,
    PipelineTaskDetail,
    PipelineTaskExecutorDetail,
)
from google.protobuf import json_format
from google.rpc import status_pb2

from penstock_local.orchestrator.inputs import Values
from penstock_local.orchestrator.state import TaskError, TaskSnapshot
from penstock_local.tasks.executor import main_job_id

_ARTIFACT_STATE_LIVE = Artifact.State.LIVE


def task_detail(task: TaskSnapshot, *, location_name: str) -> PipelineTaskDetail:
    """The detail of one task. `location_name` is `projects/NUMBER/locations/LOCATION`."""
    detail = PipelineTaskDetail(
        task_id=task.task_id,
        parent_task_id=task.parent_task_id or 0,
        task_name=task.task_name,
        create_time=task.create_time,
        start_time=task.start_time,
        end_time=task.end_time,
        state=PipelineTaskDetail.State(int(task.state)),
        error=_status(task.error),
        inputs=_artifacts(task.inputs),
        outputs=_artifacts(task.outputs),
        execution=_execution(task, location_name),
    )
    if task.attempts:
        # Documented: the names of the CustomJobs of the container, that of the last attempt and those that failed
        # before it. That their ids are where the task's lines are filed is our reading, from the labels of CustomJobs.
        *failed, last = [
            f"{location_name}/customJobs/{main_job_id(str(task.task_id), attempt.number)}"
            for attempt in task.attempts
        ]
        detail.executor_detail = PipelineTaskExecutorDetail(
            container_detail=PipelineTaskExecutorDetail.ContainerDetail(
                main_job=last,
                failed_main_jobs=failed,
            )
        )
    return detail


def _status(error: TaskError | None) -> Any:
    return status_pb2.Status(code=int(error.code), message=error.message) if error else None


def _artifacts(values: Values) -> Mapping[str, PipelineTaskDetail.ArtifactList]:
    return {
        name: PipelineTaskDetail.ArtifactList(
            artifacts=[
                Artifact(
                    name=artifact.name,
                    uri=artifact.uri,
                    schema_title=artifact.schema_title,
                    schema_version=artifact.schema_version,
                    metadata=dict(artifact.metadata),
                    state=_ARTIFACT_STATE_LIVE,
                )
                for artifact in artifacts
            ]
        )
        for name, artifacts in values.artifacts.items()
    }


def _execution(task: TaskSnapshot, location_name: str) -> Execution:
    """Vertex keeps a task's parameter values in its execution's metadata, under `input:` and `output:` names."""
    metadata = {f"input:{name}": value for name, value in task.inputs.parameters.items()}
    metadata |= {f"output:{name}": value for name, value in task.outputs.parameters.items()}
    execution = Execution(
        name=f"{location_name}/metadataStores/default/executions/{task.task_id}",
        display_name=task.task_name,
        schema_title="system.ContainerExecution" if task.attempts else "system.DagExecution",
    )
    json_format.ParseDict(metadata, Execution.pb(execution).metadata)
    return execution
