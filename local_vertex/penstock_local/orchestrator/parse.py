"""Tasks and DAGs, from protobuf to `ir`; what the engine cannot honour is refused by the path of its field."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf import json_format

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.conditions import Condition, parse_condition
from penstock_local.orchestrator.definitions import (
    artifacts,
    container,
    importer,
    json_value,
    parameters,
    parse_message,
    refuse_set,
)
from penstock_local.orchestrator.errors import ConditionError, InvalidSpecError, UnsupportedSpecError
from penstock_local.orchestrator.proto import pipeline_spec_pb2
from penstock_local.orchestrator.values import plain

SCHEMA_VERSION = "2.1.0"
_SELECTOR = re.compile(r'parseJson\(string_value\)\["([^"]+)"\]')


class SpecParser:
    """Parses the components of one pipeline, each once, in the order in which tasks ask for them."""

    def __init__(self, spec: Any) -> None:
        deployment = pipeline_spec_pb2.PipelineDeploymentConfig()
        content = json_format.MessageToDict(spec.deployment_spec)
        self._executors = parse_message(deployment, content, "pipelineSpec.deploymentSpec").executors
        self._spec = spec
        self._components: dict[str, ir.Component] = {}
        self._open: list[str] = []

    def root(self) -> ir.Component:
        """The pipeline itself. Raises `SpecError`."""
        if self._spec.schema_version != SCHEMA_VERSION:
            raise UnsupportedSpecError(
                "pipelineSpec.schemaVersion",
                f"{self._spec.schema_version!r}, want {SCHEMA_VERSION}; compile with kfp 2",
            )
        if not self._spec.root.HasField("dag"):
            raise InvalidSpecError("pipelineSpec.root", "has no dag; a pipeline's root is a DAG")
        return self._component("root", self._spec.root, "pipelineSpec.root")

    def _referenced(self, name: str, path: str) -> ir.Component:
        if name not in self._spec.components:
            raise InvalidSpecError(f"{path}.componentRef.name", f"{name!r} is not in pipelineSpec.components")
        if name in self._open:
            raise UnsupportedSpecError(
                f"{path}.componentRef.name", f"{name!r} contains itself; recursion does not end"
            )
        if name not in self._components:
            self._open.append(name)
            where = f"pipelineSpec.components['{name}']"
            self._components[name] = self._component(name, self._spec.components[name], where)
            self._open.pop()
        return self._components[name]

    def _component(self, name: str, message: Any, path: str) -> ir.Component:
        refuse_set(message, path, ("single_platform_specs", "task_config_passthroughs"))
        inputs, outputs = message.input_definitions, message.output_definitions
        is_dag = message.HasField("dag")
        implementation = self._dag(message.dag, f"{path}.dag") if is_dag else self._executor(message, path)
        if not is_dag:
            for output, definition in outputs.artifacts.items():
                refuse_set(
                    definition, f"{path}.outputDefinitions.artifacts['{output}']", ("is_artifact_list",)
                )
        return ir.Component(
            name=name,
            input_parameters=parameters(inputs.parameters, f"{path}.inputDefinitions.parameters"),
            input_artifacts=artifacts(inputs.artifacts, f"{path}.inputDefinitions.artifacts"),
            output_parameters=parameters(outputs.parameters, f"{path}.outputDefinitions.parameters"),
            output_artifacts=artifacts(outputs.artifacts, f"{path}.outputDefinitions.artifacts"),
            implementation=implementation,
        )

    def _executor(self, message: Any, path: str) -> ir.Container | ir.Importer:
        label = message.executor_label
        if label not in self._executors:
            known = ", ".join(sorted(self._executors)) or "none"
            raise InvalidSpecError(
                f"{path}.executorLabel", f"{label!r} is not an executor of the deploymentSpec ({known})"
            )
        where = f"pipelineSpec.deploymentSpec.executors['{label}']"
        kind = self._executors[label].WhichOneof("spec")
        if kind == "container":
            return container(self._executors[label].container, f"{where}.container")
        if kind == "importer":
            return importer(self._executors[label].importer, f"{where}.importer")
        raise UnsupportedSpecError(f"{where}.{kind}", "only container and importer executors run here")

    def _dag(self, message: Any, path: str) -> ir.Dag:
        tasks = {
            name: self._task(name, task, f"{path}.tasks['{name}']") for name, task in message.tasks.items()
        }
        return ir.Dag(
            tasks={
                name: replace(task, is_exit_task=_is_exit_task(task, tasks)) for name, task in tasks.items()
            },
            parameter_outputs={
                name: _parameter_selectors(output, f"{path}.outputs.parameters['{name}']")
                for name, output in message.outputs.parameters.items()
            },
            artifact_outputs={
                name: tuple(
                    ir.FromTask(s.producer_subtask, s.output_artifact_key) for s in output.artifact_selectors
                )
                for name, output in message.outputs.artifacts.items()
            },
        )

    def _task(self, name: str, message: Any, path: str) -> ir.Task:
        component = self._referenced(message.component_ref.name, path)
        from_parameters = {
            key: _parameter_source(source, f"{path}.inputs.parameters['{key}']")
            for key, source in message.inputs.parameters.items()
        }
        from_artifacts = {
            key: _artifact_source(source, f"{path}.inputs.artifacts['{key}']")
            for key, source in message.inputs.artifacts.items()
        }
        refuse_set(message.caching_options, f"{path}.cachingOptions", ("cache_key",))
        trigger = message.trigger_policy
        return ir.Task(
            name=name,
            path=path,
            component=component,
            parameters=from_parameters,
            artifacts=from_artifacts,
            dependencies=_dependencies(
                message.dependent_tasks, (*from_parameters.values(), *from_artifacts.values())
            ),
            condition=_condition(trigger.condition, f"{path}.triggerPolicy.condition"),
            needs_success=trigger.strategy != trigger.ALL_UPSTREAM_TASKS_COMPLETED,
            enable_cache=message.caching_options.enable_cache,
            retry=_retry(message.retry_policy, component, f"{path}.retryPolicy"),
            loop=_loop(message, component, path),
        )


def _parameter_source(message: Any, path: str) -> ir.ParameterSource:
    key = _selector(message.parameter_expression_selector, f"{path}.parameterExpressionSelector")
    match message.WhichOneof("kind"):
        case "component_input_parameter":
            return ir.FromParent(message.component_input_parameter, key)
        case "task_output_parameter":
            source = message.task_output_parameter
            return ir.FromTask(source.producer_task, source.output_parameter_key, key)
        case "task_final_status":
            return ir.FinalStatusOf(message.task_final_status.producer_task)
        case "runtime_value" if message.runtime_value.HasField("constant"):
            return ir.Constant(json_value(message.runtime_value.constant))
    raise UnsupportedSpecError(path, "want a constant, a component input, a task output or a final status")


def _artifact_source(message: Any, path: str) -> ir.ArtifactSource:
    match message.WhichOneof("kind"):
        case "component_input_artifact":
            return ir.FromParent(message.component_input_artifact)
        case "task_output_artifact":
            return ir.FromTask(
                message.task_output_artifact.producer_task, message.task_output_artifact.output_artifact_key
            )
    raise InvalidSpecError(path, "names neither a task output nor a component input")


def _selector(text: str, path: str) -> str | None:
    if not text:
        return None
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise UnsupportedSpecError(path, f'{text!r}; supported is parseJson(string_value)["key"]')
    return match[1]


def _parameter_selectors(message: Any, path: str) -> tuple[ir.FromTask, ...]:
    match message.WhichOneof("kind"):
        case "value_from_parameter":
            selectors = [message.value_from_parameter]
        case "value_from_oneof":
            selectors = list(message.value_from_oneof.parameter_selectors)
        case _:
            raise InvalidSpecError(path, "selects no task output")
    return tuple(ir.FromTask(s.producer_subtask, s.output_parameter_key) for s in selectors)


def _is_exit_task(task: ir.Task, siblings: Mapping[str, ir.Task]) -> bool:
    """Whether this is the exit task of an ExitHandler, for which the IR has no mark.

    It runs however its dependencies ended, and either asks for a final status, or waits for groups only and takes
    none of their outputs. `ignore_upstream_failure()` alone waits for tasks, or for outputs.
    """
    sources = (*task.parameters.values(), *task.artifacts.values())
    if task.needs_success:
        return False
    if any(isinstance(source, ir.FinalStatusOf) for source in sources):
        return True
    upstream = [siblings[name].component.implementation for name in task.dependencies if name in siblings]
    takes_outputs = any(isinstance(source, ir.FromTask) for source in sources)
    return bool(upstream) and all(isinstance(each, ir.Dag) for each in upstream) and not takes_outputs


def _dependencies(
    named: Iterable[str], sources: Iterable[ir.ParameterSource | ir.ArtifactSource]
) -> frozenset[str]:
    implied = (source.task for source in sources if isinstance(source, ir.FromTask | ir.FinalStatusOf))
    return frozenset((*named, *implied))


def _condition(text: str, path: str) -> Condition | None:
    try:
        return parse_condition(text) if text else None
    except ConditionError as exc:
        raise InvalidSpecError(path, f"{text!r}: {exc}") from exc


def _retry(message: Any, component: ir.Component, path: str) -> ir.RetryPolicy:
    if message.max_retry_count and isinstance(component.implementation, ir.Dag):
        raise UnsupportedSpecError(path, "a whole DAG is not retried; set the retry on its tasks")
    defaults = ir.RetryPolicy()
    return ir.RetryPolicy(
        max_retries=message.max_retry_count,
        backoff_seconds=_seconds(message.backoff_duration),
        backoff_factor=message.backoff_factor or defaults.backoff_factor,
        backoff_max_seconds=_seconds(message.backoff_max_duration) or defaults.backoff_max_seconds,
    )


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def _loop(message: Any, component: ir.Component, path: str) -> ir.Loop | None:
    kind = message.WhichOneof("iterator")
    if kind is None:
        return None
    if not isinstance(component.implementation, ir.Dag):
        raise UnsupportedSpecError(
            f"{path}.{message.DESCRIPTOR.fields_by_name[kind].json_name}", "only a DAG is iterated"
        )
    over_artifacts = kind == "artifact_iterator"
    iterator = getattr(message, kind)
    is_raw = not over_artifacts and iterator.items.WhichOneof("kind") == "raw"
    return ir.Loop(
        item_input=iterator.item_input,
        items=_raw_items(iterator.items.raw, f"{path}.parameterIterator.items.raw") if is_raw else None,
        items_input=iterator.items.input_artifact if over_artifacts else iterator.items.input_parameter,
        over_artifacts=over_artifacts,
        parallelism=message.iterator_policy.parallelism_limit,
    )


def _raw_items(text: str, path: str) -> tuple[Any, ...]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as exc:
        raise InvalidSpecError(path, f"not JSON: {exc}") from exc
    if not isinstance(items, list):
        raise InvalidSpecError(path, f"want a JSON list, got {text}")
    return tuple(plain(items))
