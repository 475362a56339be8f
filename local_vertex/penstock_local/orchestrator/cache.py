"""Reuse of outputs between runs: what identifies an execution, and where outputs are kept."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.inputs import Values

CachedOutputs = Values
"""The parameters and artifacts of an earlier success; artifacts keep their names and URIs."""


class Cache(Protocol):
    """Outputs by key, without expiry. A Protocol because the service keeps them in its own state."""

    def get(self, key: str) -> CachedOutputs | None:
        """The outputs stored under `key`, or None."""
        ...

    def put(self, key: str, outputs: CachedOutputs) -> None:
        """Stores `outputs`, replacing what was there."""
        ...


def cache_key(pipeline_name: str, component: ir.Component, inputs: Values) -> str:
    """Identifies an execution as Vertex AI documents it.

    The pipeline's name, the container as written in the spec (image, command, args, env, in order), the values of
    the input parameters, the names and URIs of the input artifacts, and the output definitions.
    """
    container = component.implementation
    assert isinstance(container, ir.Container)
    identity = {
        "pipeline": pipeline_name,
        "container": [container.image, container.command, container.args, list(container.env.items())],
        "parameters": inputs.parameters,
        "artifacts": {name: [(a.name, a.uri) for a in values] for name, values in inputs.artifacts.items()},
        "outputs": _output_definitions(component),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _output_definitions(component: ir.Component) -> Mapping[str, Any]:
    return {
        "parameters": {
            name: definition.type.value for name, definition in component.output_parameters.items()
        },
        "artifacts": {
            name: [definition.schema_title, definition.schema_version, definition.metadata]
            for name, definition in component.output_artifacts.items()
        },
    }
