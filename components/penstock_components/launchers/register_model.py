"""Register the model as a version with the alias `challenger`, and make it the champion if the gate said so.

    python -m penstock_components.launchers.register_model --executor-input '{{$}}'

The version carries the run's name as a label: a retry adopts the version that an earlier try has uploaded.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_components.launchers import executor
from penstock_components.launchers.contracts import read_contract
from penstock_components.launchers.errors import InputError
from penstock_components.launchers.registry import (
    CHALLENGER,
    CHAMPION,
    DEFAULT,
    RUN_LABEL,
    RegisteredVersion,
    Registry,
    connect,
    label_value,
)
from penstock_components.launchers.verdict import Verdict

log = logging.getLogger(__name__)

SERVING_PORT = 8080


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    model_id: str
    display_name: str
    description: str
    serving_image: str
    run_name: str
    project: str
    location: str


def register_model(task: executor.ExecutorInput, *, open_registry: Callable[..., Registry] = connect) -> None:
    """Upload or adopt the version of this run, then move its aliases in one request."""
    inputs = task.parameters_as(Inputs)
    model = task.input("model")
    verdict = read_contract(task.input("verdict").uri, Verdict.from_json, what="verdict")
    _check_verdict(verdict, model.uri)
    registry = open_registry(project=inputs.project, location=inputs.location)
    versions = registry.versions(inputs.model_id)
    label = label_value(inputs.run_name)
    version = next((found for found in versions if found.labels.get(RUN_LABEL) == label), None)
    if version is not None:
        log.info("%s: adopted, an earlier try of this run has uploaded it", version.resource_name)
    else:
        version = registry.upload(inputs.model_id, model_resource(inputs, model.uri, verdict))
    aliases = [CHALLENGER]
    # Listed again: the upload takes its time, and another run may have promoted a better model meanwhile.
    if verdict.promote and _champion_is_as_judged(registry.versions(inputs.model_id), version, verdict):
        aliases += [CHAMPION, DEFAULT]
    version = registry.move_aliases(version, aliases)
    executor.write_outputs(
        task,
        parameters={
            "resource_name": version.resource_name,
            "version_id": version.version_id,
            "aliases": ",".join(sorted(version.aliases)),
        },
        metadata={"registered": {"resourceName": version.resource_name}},
        uris={
            "registered": f"https://{inputs.location}-aiplatform.googleapis.com/v1/{version.resource_name}"
        },
    )


def model_resource(inputs: Inputs, artifact_uri: str, verdict: Verdict) -> dict[str, Any]:
    """The Model to upload. `default` is not among its aliases, so the upload takes nothing from the champion."""
    return {
        "display_name": inputs.display_name or inputs.model_id,
        "description": inputs.description,
        "version_description": " ".join(verdict.reasons),
        "artifact_uri": artifact_uri,
        "labels": {RUN_LABEL: label_value(inputs.run_name)},
        "container_spec": serving_container(inputs.serving_image),
    }


def serving_container(image: str) -> dict[str, Any]:
    """How Vertex AI serves the export with a vLLM image: arguments, routes and sizes of Google's own vLLM samples.

    Those pass the whole command line as arguments and leave the image's entry point in charge. The weights are read
    from AIP_STORAGE_URI, the copy of artifact_uri that Vertex AI makes for the container. Not tried on Vertex AI.
    """
    return {
        "image_uri": image,
        "args": [
            "python",
            "-m",
            "vllm.entrypoints.api_server",
            "--host=0.0.0.0",
            f"--port={SERVING_PORT}",
            "--model=$(AIP_STORAGE_URI)",
        ],
        "ports": [{"container_port": SERVING_PORT}],
        "predict_route": "/generate",
        "health_route": "/ping",
        "shared_memory_size_mb": 16 * 1024,
        "deployment_timeout": {"seconds": 7200},
    }


def _check_verdict(verdict: Verdict, model_uri: str) -> None:
    if verdict.challenger_uri != model_uri:
        raise InputError(
            f"the verdict is about {verdict.challenger_uri}, the model is {model_uri}; give both of one run."
        )
    if not verdict.register:
        raise InputError(f"the gate refused {model_uri}: {' '.join(verdict.reasons)} It is not registered.")


def _champion_is_as_judged(
    versions: list[RegisteredVersion], version: RegisteredVersion, verdict: Verdict
) -> bool:
    """The model has beaten the champion that the gate saw; against another one, nobody knows."""
    champion = next((found for found in versions if CHAMPION in found.aliases), None)
    now = champion.resource_name if champion else ""
    if now in (verdict.champion_name, version.resource_name):
        return True
    log.warning(
        "not promoted: the gate compared with champion %r, by now it is %r; run again to compare with that",
        verdict.champion_name,
        now,
    )
    return False


def main(argv: Sequence[str] | None = None, *, open_registry: Callable[..., Registry] = connect) -> int:
    """Exit code of the task."""
    return executor.run(functools.partial(register_model, open_registry=open_registry), argv)


if __name__ == "__main__":
    sys.exit(main())
