"""The `{{$...}}` placeholders of the pipeline IR, and the JSON forms Concat and IfPresent.

A text is scanned once, from left to right: what replaces a placeholder is never scanned again, so data that a task
produced cannot make the engine look anything up.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_local.orchestrator.artifact import Artifact
from penstock_local.orchestrator.errors import PlaceholderError
from penstock_local.orchestrator.values import to_text

_PLACEHOLDER = re.compile(r"\{\{\$(.*?)\}\}")
_STEP = re.compile(r"\.(?P<name>\w+)|\['(?P<single>[^']*)'\]|\[\"(?P<double>[^\"]*)\"\]|\[(?P<index>\d+)\]")
_WHOLE_INPUT = re.compile(r"\{\{\$(?:\.json_escape\[\d+\])?\}\}")
_STRUCTURES = ("Concat", "IfPresent")


def no_parameter(name: str) -> Any:
    """The parameter look-up of a scope that has none."""
    raise PlaceholderError(f"the input parameter {name!r} does not exist here")


def no_path(uri: str) -> str:
    """The path of an artifact where no container runs."""
    raise PlaceholderError(f"{uri} has a path only in the strings and inputs of a container task")


def no_content(uri: str) -> bytes:
    """The content of an artifact in a scope that has none."""
    raise FileNotFoundError(f"nothing is stored for {uri}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What placeholders can refer to at one place. Every method raises `PlaceholderError`."""

    constants: Mapping[str, str]
    """`pipeline_job_name` and the other names without brackets."""
    parameter: Callable[[str], Any] = no_parameter
    """The value of an input parameter; None if it is optional and was not given."""
    artifacts: Mapping[str, tuple[Artifact, ...] | None] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """The `outputs` of the ExecutorInput."""
    templates: Mapping[str, Any] = field(default_factory=dict)
    """Input parameters whose constant contains the ExecutorInput, as written; see `contains_whole_input`."""
    executor_input: Mapping[str, Any] | None = None
    """None while it is being built: then `{{$}}` and `{{$.json_escape[1]}}` stay as they are."""
    local_path: Callable[[str], str] = no_path
    """Maps an artifact's gs:// URI to the path at which a task finds it."""
    read_object: Callable[[str], bytes] = no_content
    """The content of a gs:// URI. Raises OSError."""

    def resolve(self, value: Any, *, depth: int = 0) -> Any:
        """`value` with the placeholders in all its strings replaced; `depth` > 0 inside a LIST or STRUCT."""
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda match: self._text(match[0], match[1], depth), value)
        if isinstance(value, Mapping):
            return {key: self.resolve(item, depth=1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolve(item, depth=1) for item in value]
        return value

    def resolve_command(self, elements: Iterable[str]) -> tuple[str, ...]:
        """A command line; IfPresent may add or drop elements."""
        return tuple(text for element in elements for text in self._element(_structure(element)))

    def _element(self, element: Any) -> Iterator[str]:
        match element:
            case str():
                yield self.resolve(element)
            case {"Concat": list(parts), **rest} if not rest:
                yield "".join(text for part in parts for text in self._element(part))
            case {"IfPresent": {"InputName": str(name), "Then": then, **rest}} if not rest.keys() - {"Else"}:
                chosen = then if self._is_present(name) else rest.get("Else", [])
                for part in chosen if isinstance(chosen, list) else [chosen]:
                    yield from self._element(part)
            case _:
                raise PlaceholderError(f"not a Concat or IfPresent that can be read: {json.dumps(element)}")

    def _is_present(self, name: str) -> bool:
        if name in self.artifacts:
            return self.artifacts[name] is not None
        return self.parameter(name) is not None

    def _text(self, placeholder: str, body: str, depth: int) -> str:
        match _steps(placeholder, body):
            case []:
                return self._whole_input(placeholder, 0, depth)
            case ["json_escape", int(level)]:
                return self._whole_input(placeholder, level, depth)
            case ["inputs", "parameters", str(name)]:
                return to_text(self._parameter(name))
            case ["inputs", "artifacts", str(name), *rest] if name in self.artifacts:
                return self._artifact(placeholder, self.artifacts[name], rest)
            case ["outputs", "parameters", str(name), "output_file"] if name in self.outputs.get(
                "parameters", {}
            ):
                return str(self.outputs["parameters"][name]["outputFile"])
            case ["outputs", "artifacts", str(name), *rest] if name in self.outputs.get("artifacts", {}):
                return self._artifact_text(placeholder, self.outputs["artifacts"][name]["artifacts"][0], rest)
            case ["outputs", "output_file"] | ["outputMetadataUri"] if self.outputs:
                return str(self.outputs["outputFile"])
            case [str(name)] if name in self.constants:
                return self.constants[name]
            case _:
                raise self._unknown(placeholder)

    def _parameter(self, name: str) -> Any:
        if name in self.templates and self.executor_input is not None:
            return self.resolve(self.templates[name])
        return self.parameter(name)

    def _whole_input(self, placeholder: str, level: int, depth: int) -> str:
        if self.executor_input is None:
            return placeholder
        if depth and not level:
            raise PlaceholderError(
                "{{$}} inside a LIST or STRUCT breaks the JSON around it; use {{$.json_escape[1]}}"
            )
        text = json.dumps(self.executor_input)
        # Inside a LIST or STRUCT the value is written as JSON later, which is one of the escapes that were asked for.
        for _ in range(level - depth):
            text = json.dumps(text)[1:-1]
        return text

    def _artifact(
        self, placeholder: str, artifacts: tuple[Artifact, ...] | None, rest: list[str | int]
    ) -> str:
        if artifacts is None:
            return to_text(None)
        if not rest:
            return json.dumps([artifact.to_runtime_json() for artifact in artifacts])
        if not artifacts:
            raise PlaceholderError(f"{placeholder}: the list of artifacts is empty")
        return self._artifact_text(placeholder, artifacts[0].to_runtime_json(), rest)

    def _artifact_text(self, placeholder: str, artifact: Mapping[str, Any], rest: list[str | int]) -> str:
        match rest:
            case ["uri" | "name" as field_name]:
                return str(artifact[field_name])
            case ["path"]:
                return self.local_path(artifact["uri"])
            case ["value"]:
                return self._content(placeholder, artifact["uri"])
            case ["metadata"]:
                return json.dumps(artifact["metadata"])
            case ["metadata", str(key)]:
                if key not in artifact["metadata"]:
                    known = ", ".join(sorted(artifact["metadata"])) or "none"
                    raise PlaceholderError(
                        f"{placeholder}: the artifact has no metadata {key!r}; it has: {known}"
                    )
                return to_text(artifact["metadata"][key])
            case _:
                raise self._unknown(placeholder)

    def _content(self, placeholder: str, uri: str) -> str:
        try:
            return self.read_object(uri).decode()
        except (OSError, UnicodeDecodeError) as exc:
            raise PlaceholderError(f"{placeholder}: cannot read {uri}: {exc}") from exc

    def _unknown(self, placeholder: str) -> PlaceholderError:
        return PlaceholderError(
            f"{placeholder} has no value here; known are {', '.join(sorted(self.constants))}, and the inputs and "
            "outputs that the component declares"
        )


def contains_whole_input(value: Any) -> bool:
    """Whether a constant contains `{{$}}` or `{{$.json_escape[n]}}`.

    Such a value cannot be resolved before the ExecutorInput exists, of which it is a part. The ExecutorInput then
    carries it as written, and the command line gets it resolved.
    """
    if isinstance(value, str):
        return _WHOLE_INPUT.search(value) is not None
    if isinstance(value, Mapping):
        return any(contains_whole_input(item) for item in value.values())
    return isinstance(value, list | tuple) and any(contains_whole_input(item) for item in value)


def contains_placeholder(value: Any) -> bool:
    """Whether a string holds any placeholder."""
    return isinstance(value, str) and _PLACEHOLDER.search(value) is not None


def _structure(element: str) -> Any:
    """The Concat or IfPresent that the compiler wrote as JSON text, else the element itself."""
    if not element.startswith(tuple(f'{{"{name}": ' for name in _STRUCTURES)):
        return element
    try:
        return json.loads(element)
    except json.JSONDecodeError as exc:
        raise PlaceholderError(f"cannot read {element}: {exc}") from exc


def _steps(placeholder: str, body: str) -> list[str | int]:
    steps: list[str | int] = []
    position = 0
    while position < len(body):
        match = _STEP.match(body, position)
        if match is None:
            raise PlaceholderError(f"cannot read {placeholder} at {body[position:]!r}")
        text = match[match.lastgroup or 0]
        steps.append(int(text) if match.lastgroup == "index" else text)
        position = match.end()
    return steps
