"""What flows into a task: its sources looked up, its constants resolved, its types enforced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.artifact import Artifact
from penstock_local.orchestrator.errors import PlaceholderError, TaskFailedError
from penstock_local.orchestrator.placeholders import Scope, contains_placeholder, contains_whole_input
from penstock_local.orchestrator.values import coerce, parse_text

_ABSENT = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The inputs or the outputs of a task. What is absent was optional, or was not produced."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, tuple[Artifact, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs(Values):
    """The resolved inputs of one task."""

    templates: Mapping[str, Any] = field(default_factory=dict)
    """Constants that contain the ExecutorInput, as written in the spec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a task's inputs come from."""

    parent: Values
    """Inputs of the DAG that holds the task."""
    outputs_of: Callable[[str], Values]
    """Outputs of another task of that DAG; empty if it did not run."""
    final_status_of: Callable[[str], dict[str, Any]]


def resolve_inputs(task: ir.Task, sources: Sources, scope: Scope) -> Inputs:
    """The inputs of `task`. Raises `TaskFailedError` for a missing value, a wrong type or a placeholder that fails."""
    artifacts = {
        name: value
        for name, source in task.artifacts.items()
        if (value := _artifact(source, sources)) is not None
    }
    item = {task.loop.item_input} if task.loop else set()
    for name, definition in task.component.input_artifacts.items():
        if name not in artifacts.keys() | item and not definition.is_optional:
            raise TaskFailedError(
                f"the input artifact {name!r} was not produced by {_origin(task.artifacts.get(name))}"
            )
    return _Resolver(task, sources, artifacts, scope).resolve()


class _Resolver:
    """Resolves the parameters of one task on demand, because constants refer to other inputs of the same task."""

    def __init__(
        self, task: ir.Task, sources: Sources, artifacts: Mapping[str, tuple[Artifact, ...]], scope: Scope
    ) -> None:
        self._task = task
        self._sources = sources
        self._artifacts = artifacts
        declared = dict.fromkeys(task.component.input_artifacts)
        self._scope = replace(scope, parameter=self._value, artifacts={**declared, **artifacts})
        self._values: dict[str, Any] = {}
        self._open: list[str] = []
        self._templates: dict[str, Any] = {}

    def resolve(self) -> Inputs:
        item = self._task.loop.item_input if self._task.loop else None
        names = [*self._task.parameters, *self._task.component.input_parameters]
        values = {name: self._value(name) for name in dict.fromkeys(names) if name != item}
        return Inputs(
            parameters={name: value for name, value in values.items() if value is not None},
            artifacts=self._artifacts,
            templates=self._templates,
        )

    def _value(self, name: str) -> Any:
        if name in self._open:
            raise PlaceholderError(f"these inputs refer to each other: {', '.join((*self._open, name))}")
        if name not in self._values:
            self._open.append(name)
            self._values[name] = self._look_up(name)
            self._open.pop()
        return self._values[name]

    def _look_up(self, name: str) -> Any:
        definition = self._task.component.input_parameters.get(name)
        source = self._task.parameters.get(name)
        if definition is None and source is None:
            known = (
                ", ".join(sorted({*self._task.parameters, *self._task.component.input_parameters})) or "none"
            )
            raise PlaceholderError(f"the input parameter {name!r} does not exist; known: {known}")
        value = _ABSENT if source is None else self._from(name, source, definition)
        if value is _ABSENT and definition is not None and definition.default is not None:
            value = self._constant(name, definition.default, definition)
        if value is not _ABSENT:
            return _checked(name, value, definition)
        is_group = isinstance(self._task.component.implementation, ir.Dag)
        if definition is not None and not definition.is_optional and not is_group:
            raise TaskFailedError(f"the input parameter {name!r} was not produced by {_origin(source)}")
        return None

    def _from(self, name: str, source: ir.ParameterSource, definition: ir.ParameterDefinition | None) -> Any:
        match source:
            case ir.Constant():
                return self._constant(name, source.value, definition)
            case ir.FinalStatusOf():
                return self._sources.final_status_of(source.task)
            case ir.FromParent():
                return _selected(name, self._sources.parent.parameters.get(source.name, _ABSENT), source.key)
            case ir.FromTask():
                produced = self._sources.outputs_of(source.task).parameters
                return _selected(name, produced.get(source.output, _ABSENT), source.key)

    def _constant(self, name: str, value: Any, definition: ir.ParameterDefinition | None) -> Any:
        if contains_whole_input(value):
            if isinstance(self._task.component.implementation, ir.Dag):
                raise PlaceholderError(
                    f"the input {name!r} holds the ExecutorInput, which only a container task has"
                )
            self._templates[name] = value
        resolved = self._scope.resolve(value)
        if definition is not None and contains_placeholder(value):
            try:
                return parse_text(resolved, definition.type)
            except ValueError as exc:
                raise TaskFailedError(f"the input parameter {name!r}: {exc}") from exc
        return resolved


def _checked(name: str, value: Any, definition: ir.ParameterDefinition | None) -> Any:
    if definition is None:
        return value
    try:
        value = coerce(value, definition.type)
    except ValueError as exc:
        raise TaskFailedError(f"the input parameter {name!r}: {exc}") from exc
    if definition.literals and value not in definition.literals:
        allowed = ", ".join(repr(literal) for literal in definition.literals)
        raise TaskFailedError(f"the input parameter {name!r}: got {value!r}, allowed: {allowed}")
    return value


def _selected(name: str, value: Any, key: str | None) -> Any:
    if key is None or value is _ABSENT:
        return value
    if not isinstance(value, Mapping) or key not in value:
        raise TaskFailedError(
            f"the input parameter {name!r} selects {key!r} of {value!r}, which has no such entry"
        )
    return value[key]


def _artifact(source: ir.ArtifactSource, sources: Sources) -> tuple[Artifact, ...] | None:
    values = sources.parent if isinstance(source, ir.FromParent) else sources.outputs_of(source.task)
    return values.artifacts.get(source.name if isinstance(source, ir.FromParent) else source.output)


def _origin(source: ir.ParameterSource | ir.ArtifactSource | None) -> str:
    match source:
        case ir.FromTask():
            return f"task {source.task!r} (output {source.output!r})"
        case ir.FromParent():
            return f"the enclosing pipeline (input {source.name!r})"
        case _:
            return "anything"
