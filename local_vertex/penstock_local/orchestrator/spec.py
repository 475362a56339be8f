"""Loads a posted pipeline spec and checks the parameters of a run against it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.definitions import parse_message
from penstock_local.orchestrator.errors import InvalidSpecError
from penstock_local.orchestrator.parse import SpecParser
from penstock_local.orchestrator.proto import pipeline_spec_pb2
from penstock_local.orchestrator.references import check_references, unknown
from penstock_local.orchestrator.values import coerce


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A pipeline that this engine can run as it stands."""

    name: str
    """`pipelineInfo.name`, which is part of every cache key."""
    default_pipeline_root: str
    root: ir.Component

    def resolve_parameters(self, runtime_values: Mapping[str, Any]) -> dict[str, Any]:
        """The run's parameters: `runtime_values` with declared types, defaults filled in.

        Raises `InvalidSpecError` for an unknown name (with the nearest known one), a missing required value or a wrong
        type. Optional parameters without default and without value are left out.
        """
        definitions = self.root.input_parameters
        for name in runtime_values:
            if name not in definitions:
                raise InvalidSpecError(_runtime_path(name), unknown(name, definitions))
        values = {name: _resolve(name, definitions[name], runtime_values) for name in definitions}
        return {name: value for name, value in values.items() if value is not None}

    def images(self) -> Iterator[tuple[str, str]]:
        """The path and the image of every container that the pipeline may start."""
        yield from dict.fromkeys(_images(self.root))


def load_pipeline(spec: Mapping[str, Any]) -> Pipeline:
    """The pipeline in `spec`, the JSON of a `PipelineSpec` as a dict.

    Raises `InvalidSpecError` or `UnsupportedSpecError`, naming the field.
    """
    message = parse_message(pipeline_spec_pb2.PipelineSpec(), spec, "pipelineSpec")
    if not message.pipeline_info.name:
        raise InvalidSpecError("pipelineSpec.pipelineInfo.name", "is empty")
    root = SpecParser(message).root()
    for name, artifact in root.input_artifacts.items():
        if not artifact.is_optional:
            path = f"pipelineSpec.root.inputDefinitions.artifacts['{name}']"
            raise InvalidSpecError(
                path, "a run takes parameters only; make the input optional or import it in the pipeline"
            )
    check_references(root)
    return Pipeline(
        name=message.pipeline_info.name,
        default_pipeline_root=message.default_pipeline_root,
        root=root,
    )


def _runtime_path(name: str) -> str:
    return f"runtimeConfig.parameterValues['{name}']"


def _resolve(name: str, definition: ir.ParameterDefinition, runtime_values: Mapping[str, Any]) -> Any:
    value = runtime_values.get(name)
    if value is None:
        value = definition.default
    if value is None:
        if not definition.is_optional:
            raise InvalidSpecError(_runtime_path(name), f"the pipeline requires a {definition.type.value}")
        return None
    try:
        value = coerce(value, definition.type)
    except ValueError as exc:
        raise InvalidSpecError(_runtime_path(name), str(exc)) from exc
    if definition.literals and value not in definition.literals:
        allowed = ", ".join(repr(literal) for literal in definition.literals)
        raise InvalidSpecError(_runtime_path(name), f"got {value!r}, allowed: {allowed}")
    return value


def _images(component: ir.Component) -> Iterator[tuple[str, str]]:
    implementation = component.implementation
    if isinstance(implementation, ir.Container):
        yield f"{implementation.path}.image", implementation.image
    elif isinstance(implementation, ir.Dag):
        for task in implementation.tasks.values():
            yield from _images(task.component)
