"""The seam to KFP: what a task is given (ExecutorInput), and the only place that writes what it hands back."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock_components.launchers.errors import InputError, LauncherError
from penstock_trainer.contract.fields import ContractError, from_dict
from penstock_trainer.storage import StorageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """An artifact of the task. Payloads go through Storage at `uri`, never through a mount."""

    name: str
    """As the backend named it, which is not the name of the input or output."""
    uri: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorInput:
    """One task's inputs and the places of its outputs: kfp's ExecutorInput, as it stands for `{{$}}` in the args."""

    parameters: Mapping[str, Any]
    inputs: Mapping[str, Artifact]
    outputs: Mapping[str, Artifact]
    parameter_files: Mapping[str, Path]
    """Where the value of each output parameter goes."""
    output_file: Path
    """executor_output.json."""

    @classmethod
    def from_json(cls, text: str) -> ExecutorInput:
        """Raises InputError when the text is not an ExecutorInput."""
        try:
            message = json.loads(text)
            inputs, outputs = message.get("inputs", {}), message["outputs"]
            return cls(
                parameters=inputs.get("parameterValues", {}),
                inputs=_artifacts(inputs),
                outputs=_artifacts(outputs),
                parameter_files={
                    name: Path(value["outputFile"]) for name, value in outputs.get("parameters", {}).items()
                },
                output_file=Path(outputs["outputFile"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
            raise InputError(
                f"--executor-input is not an ExecutorInput ({exc!r}). Pass kfp's placeholder {{{{$}}}}; given: "
                f"{text[:200]!r}."
            ) from exc

    def parameters_as(self, cls: type[T]) -> T:
        """The input parameters as the caller's dataclass.

        Raises InputError for one that is missing, unknown, ill-typed, or a placeholder that the backend left
        unresolved: a launcher must never write to a directory that is called `{{$.pipeline_root}}`.
        """
        for name, value in self.parameters.items():
            if isinstance(value, str) and value.startswith("{{$"):
                raise InputError(
                    f"parameter {name} = {value!r}: the backend did not resolve this placeholder."
                )
        try:
            return from_dict(cls, self.parameters)
        except ContractError as exc:
            raise InputError(f"input parameters: {exc}") from exc

    def input(self, name: str) -> Artifact:
        """An input artifact. Raises InputError if the task was given none of that name."""
        return self._artifact(self.inputs, name, "input")

    def output(self, name: str) -> Artifact:
        """An output artifact. Raises InputError if the component declares none of that name."""
        return self._artifact(self.outputs, name, "output")

    @staticmethod
    def _artifact(artifacts: Mapping[str, Artifact], name: str, direction: str) -> Artifact:
        if name not in artifacts:
            raise InputError(
                f"there is no {direction} artifact {name!r}; this task has: {', '.join(sorted(artifacts)) or 'none'}."
            )
        return artifacts[name]


def write_outputs(
    task: ExecutorInput,
    *,
    parameters: Mapping[str, str | int | float | bool] | None = None,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    uris: Mapping[str, str] | None = None,
) -> None:
    """Hand back parameter values, and metadata and changed URIs by output artifact.

    A parameter is written twice: to its own file, which is how a container component hands it back on Vertex AI and
    in kfp, and to executor_output.json, which an engine that reads only that file finds complete. Both say the same.
    executor_output.json comes last, so that it exists only for a task that got to its end.
    """
    parameters, metadata, uris = parameters or {}, metadata or {}, uris or {}
    for name, value in parameters.items():
        path = task.parameter_files[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    artifacts = {
        name: {
            "artifacts": [
                # The name is handed back as it came: Vertex AI refuses another one.
                {
                    "name": artifact.name,
                    "uri": uris.get(name, artifact.uri),
                    "metadata": {**artifact.metadata, **metadata.get(name, {})},
                }
            ]
        }
        for name, artifact in task.outputs.items()
    }
    told = {"parameterValues": dict(parameters), "artifacts": artifacts}
    task.output_file.parent.mkdir(parents=True, exist_ok=True)
    task.output_file.write_text(json.dumps(told, allow_nan=False, indent=1))


def run(body: Callable[[ExecutorInput], None], argv: Sequence[str] | None = None) -> int:
    """Run a launcher on its command line and return its exit code.

    0: done. 1: a LauncherError or StorageError, told on stderr in one message. Everything else is a defect and
    keeps its traceback.
    """
    parser = argparse.ArgumentParser(description=body.__doc__)
    parser.add_argument("--executor-input", required=True, help="kfp's ExecutorInput as JSON: {{$}}")
    options = parser.parse_args(argv)
    # stdout: what a task writes to stderr is shown as an error in Cloud Logging.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        body(ExecutorInput.from_json(options.executor_input))
    except (LauncherError, StorageError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _artifacts(message: Mapping[str, Any]) -> dict[str, Artifact]:
    """First artifact of each list; our components declare no lists of artifacts."""
    found = {}
    for name, value in message.get("artifacts", {}).items():
        first = value["artifacts"][0]
        found[name] = Artifact(
            name=first.get("name", name), uri=first.get("uri", ""), metadata=first.get("metadata", {})
        )
    return found
