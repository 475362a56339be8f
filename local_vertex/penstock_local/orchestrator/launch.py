"""Prepares one container task: ids, ExecutorInput, command line and cache key, all fixed before its first attempt."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.artifact import Artifact, imported_artifact_id, new_artifact_id
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.errors import TaskFailedError
from penstock_local.orchestrator.exchange import (
    MAX_ARTIFACTS,
    announce_outputs,
    executor_inputs,
    executor_outputs,
    read_outputs,
)
from penstock_local.orchestrator.executor import TaskLaunch, path_in_view, view_root
from penstock_local.orchestrator.inputs import Inputs, Sources, Values, resolve_inputs
from penstock_local.orchestrator.placeholders import Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan:
    """A container task with resolved inputs."""

    component: ir.Component
    inputs: Inputs
    launch: TaskLaunch
    """Of the first attempt."""
    announced: Mapping[str, Artifact]
    """Output artifacts before the task has written them."""

    def attempt(self, number: int) -> TaskLaunch:
        """The launch of one attempt; only its number differs."""
        return replace(self.launch, attempt=number)

    def prepare_work_dir(self) -> None:
        """Makes the folders that a container expects. A retry finds the files of the attempt before it."""
        (self.launch.work_dir / "outputs").mkdir(parents=True, exist_ok=True)

    def read_outputs(self) -> Values:
        """What the container left behind. Raises `OutputError`."""
        return read_outputs(self.component, self.announced, self.launch.executor_input["outputs"])


def task_scope(context: RunContext, task_name: str, task_id: int) -> Scope:
    """The placeholders of a task before its inputs and outputs are known."""
    names = {"pipeline_task_name": task_name, "pipeline_task_uuid": str(task_id)}
    return Scope(constants={**context.placeholders(), **names}, read_object=context.read_object)


def plan_container(
    task: ir.Task, context: RunContext, sources: Sources, *, task_id: int, work_dir: Path
) -> ContainerPlan:
    """Resolves everything about a container task. Raises `TaskFailedError`; writes nothing."""
    component, container = task.component, task.component.implementation
    assert isinstance(container, ir.Container)
    work_dir = work_dir / f"{task.name}_{task_id}"
    announced = announce_outputs(component, context, task.name, task_id)
    outputs = executor_outputs(component, announced, work_dir)
    scope = replace(
        task_scope(context, task.name, task_id),
        outputs=outputs,
        local_path=functools.partial(path_in_view, view_root(work_dir)),
    )
    inputs = resolve_inputs(task, sources, scope)
    _check_artifact_count(inputs, len(announced))
    executor_input = {"inputs": executor_inputs(inputs), "outputs": outputs}
    scope = command_scope(scope, task, inputs, executor_input)
    launch = TaskLaunch(
        pipeline_job_name=context.resource_name,
        component_name=component.name,
        task_name=task.name,
        task_id=str(task_id),
        attempt=1,
        image=container.image,
        command=scope.resolve_command(container.command),
        args=scope.resolve_command(container.args),
        env={name: scope.resolve(value) for name, value in container.env.items()},
        executor_input=executor_input,
        work_dir=work_dir,
    )
    return ContainerPlan(component=component, inputs=inputs, launch=launch, announced=announced)


def import_artifact(task: ir.Task, context: RunContext, inputs: Inputs, *, task_id: int) -> Values:
    """The one output of an importer task. Raises `TaskFailedError`.

    Importing the same URI, type and metadata again gives the same artifact unless `reimport` is set, so what
    consumes it can come from the cache.
    """
    component, importer = task.component, task.component.implementation
    assert isinstance(importer, ir.Importer)
    scope = command_scope(task_scope(context, task.name, task_id), task, inputs, None)
    uri = inputs.parameters.get("uri") if importer.uri is None else scope.resolve(importer.uri)
    if not isinstance(uri, str) or not uri:
        raise TaskFailedError(f"an importer needs a URI, got {uri!r}")
    metadata = scope.resolve(importer.metadata)
    [(name, definition)] = component.output_artifacts.items()
    same_id = imported_artifact_id(uri, definition.schema_title, metadata)
    artifact = Artifact(
        name=context.artifact_name(new_artifact_id() if importer.reimport else same_id),
        uri=uri,
        schema_title=definition.schema_title,
        schema_version=definition.schema_version,
        metadata=metadata,
    )
    return Values(artifacts={name: (artifact,)})


def command_scope(
    scope: Scope, task: ir.Task, inputs: Inputs, executor_input: Mapping[str, Any] | None
) -> Scope:
    """`scope` with the resolved inputs of `task`: what its container's strings may refer to.

    An optional input that was not given reads as `null`, as in kfp: GCPC builds JSON payloads that rely on it.
    """
    declared = dict.fromkeys([*task.component.input_parameters, *task.parameters])
    values = {**declared, **inputs.parameters}

    def parameter(name: str) -> Any:
        return values[name] if name in values else scope.parameter(name)

    return replace(
        scope,
        parameter=parameter,
        artifacts={**dict.fromkeys(task.component.input_artifacts), **inputs.artifacts},
        templates=inputs.templates,
        executor_input=executor_input,
    )


def _check_artifact_count(inputs: Values, num_outputs: int) -> None:
    requested = sum(len(artifacts) for artifacts in inputs.artifacts.values()) + num_outputs
    if requested > MAX_ARTIFACTS:
        raise TaskFailedError(
            f"Maximum number of artifacts exceeded. Maximum allowed: {MAX_ARTIFACTS}, requested: {requested}"
        )
