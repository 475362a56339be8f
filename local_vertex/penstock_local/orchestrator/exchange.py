"""The files through which the engine and a container talk: ExecutorInput in, executor_output.json and outputs back."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.artifact import Artifact, new_artifact_id
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.errors import OutputError
from penstock_local.orchestrator.inputs import Values
from penstock_local.orchestrator.proto import pipeline_spec_pb2
from penstock_local.orchestrator.values import coerce, parse_text, plain

MAX_OUTPUT_BYTES = 131_072
"""JSON payload of one task's output parameters and artifacts (Vertex AI quotas page)."""
MAX_ARTIFACTS = 100
"""Input and output artifacts of one task (Vertex AI quotas page)."""


def announce_outputs(
    component: ir.Component, context: RunContext, task_name: str, task_id: int
) -> dict[str, Artifact]:
    """The output artifacts as they are before the task runs: named, typed, with the URI to write to."""
    return {
        name: Artifact(
            name=context.artifact_name(new_artifact_id()),
            uri=context.output_uri(task_name, task_id, name),
            schema_title=definition.schema_title,
            schema_version=definition.schema_version,
            metadata=definition.metadata,
        )
        for name, definition in component.output_artifacts.items()
    }


def executor_outputs(
    component: ir.Component, announced: Mapping[str, Artifact], work_dir: Path
) -> dict[str, Any]:
    """The `outputs` part of an ExecutorInput; all its files are in `work_dir`."""
    return {
        "parameters": {
            name: {"outputFile": str(work_dir / "outputs" / name)} for name in component.output_parameters
        },
        "artifacts": {
            name: {"artifacts": [artifact.to_runtime_json()]} for name, artifact in announced.items()
        },
        "outputFile": str(work_dir / "executor_output.json"),
    }


def executor_inputs(inputs: Values) -> dict[str, Any]:
    """The `inputs` part of an ExecutorInput."""
    return {
        "parameterValues": dict(inputs.parameters),
        "artifacts": {
            name: {"artifacts": [artifact.to_runtime_json() for artifact in artifacts]}
            for name, artifacts in inputs.artifacts.items()
        },
    }


def read_outputs(
    component: ir.Component, announced: Mapping[str, Artifact], outputs: Mapping[str, Any]
) -> Values:
    """What a successful container left behind; `outputs` is that part of its ExecutorInput.

    A parameter's own file wins over executor_output.json. Raises `OutputError` for a declared parameter that is
    missing, a wrong type, an undeclared name or too much data.
    """
    reported = _read_executor_output(Path(outputs["outputFile"]))
    _check_known(component, reported)
    values = Values(
        parameters={
            name: _parameter(name, definition, Path(outputs["parameters"][name]["outputFile"]), reported)
            for name, definition in component.output_parameters.items()
        },
        artifacts={name: (_artifact(name, artifact, reported),) for name, artifact in announced.items()},
    )
    _check_size(values)
    return values


def _read_executor_output(path: Path) -> Any:
    message = pipeline_spec_pb2.ExecutorOutput()
    if not path.exists():
        return message
    try:
        return json_format.Parse(path.read_text(), message, ignore_unknown_fields=False)
    except (json_format.ParseError, UnicodeDecodeError) as exc:
        raise OutputError(f"executor_output.json is not an ExecutorOutput: {exc}") from exc


def _check_known(component: ir.Component, reported: Any) -> None:
    if reported.parameters:
        raise OutputError(
            "executor_output.json uses the outdated field 'parameters'; write 'parameterValues'"
        )
    for kind, names, declared in (
        ("parameter", reported.parameter_values, component.output_parameters),
        ("artifact", reported.artifacts, component.output_artifacts),
    ):
        for name in names:
            if name not in declared:
                known = ", ".join(sorted(declared)) or "none"
                raise OutputError(
                    f"executor_output.json has the {kind} {name!r}; the component declares: {known}"
                )


def _parameter(name: str, definition: ir.ParameterDefinition, path: Path, reported: Any) -> Any:
    try:
        if path.exists():
            return parse_text(path.read_text(), definition.type)
        if name in reported.parameter_values:
            value = json_format.MessageToDict(reported.parameter_values[name])
            return coerce(value, definition.type)
    except ValueError as exc:
        raise OutputError(f"the output parameter {name!r}: {exc}") from exc
    raise OutputError(
        f"the output parameter {name!r} is missing: neither {path} nor executor_output.json has it"
    )


def _artifact(name: str, announced: Artifact, reported: Any) -> Artifact:
    if name not in reported.artifacts or not reported.artifacts[name].artifacts:
        return announced
    artifacts = reported.artifacts[name].artifacts
    if len(artifacts) > 1:
        raise OutputError(
            f"the output artifact {name!r} is one artifact; executor_output.json has {len(artifacts)}"
        )
    if artifacts[0].custom_path:
        raise OutputError(f"the output artifact {name!r} sets custom_path, which Vertex AI does not have")
    # The name stays the one that the metadata store gave; Vertex AI takes no other.
    return replace(
        announced,
        uri=artifacts[0].uri or announced.uri,
        metadata={**announced.metadata, **plain(json_format.MessageToDict(artifacts[0].metadata))},
    )


def _check_size(values: Values) -> None:
    artifacts = {
        name: [artifact.to_runtime_json() for artifact in some] for name, some in values.artifacts.items()
    }
    size = len(json.dumps([values.parameters, artifacts]).encode())
    if size > MAX_OUTPUT_BYTES:
        raise OutputError(
            f"the outputs are {size} bytes of JSON, allowed are {MAX_OUTPUT_BYTES}; write large data to an artifact"
        )
