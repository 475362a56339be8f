"""The pipeline as the engine sees it: immutable, typed, without anything that the engine would ignore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock_local.orchestrator.conditions import Condition
from penstock_local.orchestrator.values import ParameterType


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDefinition:
    """A declared input or output parameter."""

    type: ParameterType
    is_optional: bool = False
    default: Any = None
    """None where the spec gives no default."""
    literals: tuple[Any, ...] = ()
    """The only values allowed; empty means any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactDefinition:
    """A declared input or output artifact."""

    schema_title: str
    schema_version: str
    is_list: bool = False
    is_optional: bool = False
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Constant:
    """A value written in the spec; its placeholders are resolved in the scope of the task."""

    value: Any


@dataclass(frozen=True, slots=True)
class FromParent:
    """An input of the DAG that holds the task; `key` selects one entry of a STRUCT."""

    name: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class FromTask:
    """An output of a task in the same DAG; `key` selects one entry of a STRUCT."""

    task: str
    output: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class FinalStatusOf:
    """The `PipelineTaskFinalStatus` of a task in the same DAG."""

    task: str


ParameterSource = Constant | FromParent | FromTask | FinalStatusOf
ArtifactSource = FromParent | FromTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container to run. Strings may hold placeholders, the image may not."""

    path: str
    """Where it stands in the spec, for messages."""
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """Makes an artifact of an existing URI."""

    uri: str | None
    """None: the URI is the task's input parameter `uri`."""
    metadata: Mapping[str, Any]
    reimport: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Dag:
    """Tasks and what they hand out together. Of several sources of one output, the one that exists wins (OneOf)."""

    tasks: Mapping[str, Task]
    parameter_outputs: Mapping[str, tuple[FromTask, ...]]
    artifact_outputs: Mapping[str, tuple[FromTask, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """An interface and what implements it."""

    name: str
    input_parameters: Mapping[str, ParameterDefinition]
    input_artifacts: Mapping[str, ArtifactDefinition]
    output_parameters: Mapping[str, ParameterDefinition]
    output_artifacts: Mapping[str, ArtifactDefinition]
    implementation: Container | Importer | Dag


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often a failed attempt is repeated, and after how long."""

    max_retries: int = 0
    backoff_seconds: float = 0.0
    backoff_factor: float = 2.0
    backoff_max_seconds: float = 3600.0

    def delay_seconds(self, failed_attempts: int) -> float:
        """Wait before the next attempt; `failed_attempts` counts from 1."""
        return min(
            self.backoff_seconds * self.backoff_factor ** (failed_attempts - 1), self.backoff_max_seconds
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A ParallelFor: the task's DAG runs once per item."""

    item_input: str
    items: tuple[Any, ...] | None
    """Items written in the spec; None: they are the input `items_input`."""
    items_input: str
    over_artifacts: bool
    parallelism: int
    """Iterations at once; 0 means all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One use of a component inside a DAG."""

    name: str
    path: str
    """Where it stands in the spec, for messages."""
    component: Component
    parameters: Mapping[str, ParameterSource]
    artifacts: Mapping[str, ArtifactSource]
    dependencies: frozenset[str]
    """Tasks of the same DAG that must have ended first, whether named or implied by an input."""
    condition: Condition | None
    needs_success: bool
    """False: runs once its dependencies have ended, however they ended."""
    enable_cache: bool
    retry: RetryPolicy
    loop: Loop | None
    is_exit_task: bool = False
    """Whether it runs even after the pipeline was cancelled or has failed fast."""
