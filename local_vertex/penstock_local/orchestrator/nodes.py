"""The tree of tasks of one run: what each has become so far."""

import abc
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.artifact import Artifact
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.errors import TaskFailedError
from penstock_local.orchestrator.inputs import Inputs, Sources, Values
from penstock_local.orchestrator.launch import ContainerPlan
from penstock_local.orchestrator.state import Attempt, ErrorCode, TaskError, TaskLife, TaskSnapshot, TaskState
from penstock_local.orchestrator.values import coerce


class Node:
    """One task of a run. Only the engine's thread touches it."""

    def __init__(self, task: ir.Task, task_id: int, parent: "Group | None") -> None:
        self.task = task
        self.task_id = task_id
        self.parent = parent
        self.life = TaskLife()
        self.inputs = Inputs()
        self.outputs = Values()
        self.attempts: list[Attempt] = []
        self.is_exit: bool = task.is_exit_task or (parent is not None and parent.is_exit)
        """Whether it runs even after a cancellation or a fast failure: an exit task, or a task inside of one."""

    @property
    def state(self) -> TaskState:
        """Where the task stands."""
        return self.life.state

    def snapshot(self) -> TaskSnapshot:
        """The task as it is now, for the outside."""
        life = self.life
        return TaskSnapshot(
            task_id=self.task_id,
            parent_task_id=None if self.parent is None else self.parent.task_id,
            task_name=self.task.name,
            component_name=self.task.component.name,
            state=life.state,
            create_time=life.create_time,
            start_time=life.start_time,
            end_time=life.end_time,
            error=life.error,
            inputs=self.inputs,
            outputs=self.outputs,
            attempts=tuple(self.attempts),
        )


class ContainerNode(Node):
    """A task that runs a container, or an importer, which has no plan."""

    def __init__(self, task: ir.Task, task_id: int, parent: "Group | None") -> None:
        super().__init__(task, task_id, parent)
        self.plan: ContainerPlan | None = None
        self.cache_key: str | None = None
        """None: the outputs are not kept for other runs."""
        self.cancelled = threading.Event()

    @property
    def has_open_attempt(self) -> bool:
        """Whether the executor has not answered yet; False between an attempt and its retry."""
        return bool(self.attempts) and self.attempts[-1].end_time is None


class Group(Node, abc.ABC):
    """A task made of tasks."""

    def __init__(self, task: ir.Task, task_id: int, parent: "Group | None") -> None:
        super().__init__(task, task_id, parent)
        self.children: dict[str, Node] = {}

    def walk(self) -> Iterator[Node]:
        """This node and everything below it."""
        yield self
        for child in self.children.values():
            yield from child.walk() if isinstance(child, Group) else (child,)

    def in_state(self, *states: TaskState) -> list[Node]:
        """The children that are in one of `states`."""
        return [child for child in self.children.values() if child.state in states]

    @property
    def is_full(self) -> bool:
        """Whether no further child may run for now."""
        return False

    @abc.abstractmethod
    def collect(self) -> Values:
        """The outputs of the group, once its children have ended."""


class DagNode(Group):
    """A DAG, or one iteration of a loop over a DAG."""

    def collect(self) -> Values:
        """For each declared output the first of its sources that exists."""
        dag = self.task.component.implementation
        assert isinstance(dag, ir.Dag)
        parameters: dict[str, Any] = {}
        for name, sources in dag.parameter_outputs.items():
            for source in sources:
                if source.output in (produced := self.children[source.task].outputs.parameters):
                    parameters.setdefault(name, produced[source.output])
        artifacts: dict[str, tuple[Artifact, ...]] = {}
        for name, sources in dag.artifact_outputs.items():
            for source in sources:
                if source.output in (made := self.children[source.task].outputs.artifacts):
                    artifacts.setdefault(name, made[source.output])
        return Values(parameters=parameters, artifacts=artifacts)


class LoopNode(Group):
    """A ParallelFor; its children are the iterations, in order."""

    @property
    def is_full(self) -> bool:
        """Whether as many iterations run as the loop's parallelism allows."""
        limit = self.task.loop.parallelism if self.task.loop else 0
        return 0 < limit <= len(self.in_state(TaskState.RUNNING, TaskState.CANCELLING))

    def iterations(self) -> list[tuple[ir.Task, Inputs]]:
        """The DAG of each item, with its inputs. Raises `TaskFailedError` for an item of the wrong type."""
        loop = self.task.loop
        assert loop is not None
        items: Sequence[Any] | None = loop.items
        if items is None:
            given: Mapping[str, Any] = (
                self.inputs.artifacts if loop.over_artifacts else self.inputs.parameters
            )
            items = given.get(loop.items_input)
        if items is None:
            raise TaskFailedError(
                f"the loop has nothing to iterate: the input {loop.items_input!r} has no value"
            )
        return [(self._iteration(index), self._bind(loop, item)) for index, item in enumerate(items)]

    def _iteration(self, index: int) -> ir.Task:
        return replace(
            self.task, name=f"{self.task.name}-{index}", loop=None, condition=None, dependencies=frozenset()
        )

    def _bind(self, loop: ir.Loop, item: Any) -> Inputs:
        if loop.over_artifacts:
            return replace(self.inputs, artifacts={**self.inputs.artifacts, loop.item_input: (item,)})
        definition = self.task.component.input_parameters.get(loop.item_input)
        try:
            value = item if definition is None else coerce(item, definition.type)
        except ValueError as exc:
            raise TaskFailedError(f"the loop item {loop.item_input!r}: {exc}") from exc
        return replace(self.inputs, parameters={**self.inputs.parameters, loop.item_input: value})

    def collect(self) -> Values:
        """Each output of the DAG as the list over all iterations; absent if an iteration did not produce it."""
        dag = self.task.component.implementation
        assert isinstance(dag, ir.Dag)
        outputs = [child.outputs for child in self.children.values()]
        return Values(
            parameters={
                name: [each.parameters[name] for each in outputs]
                for name in dag.parameter_outputs
                if all(name in each.parameters for each in outputs)
            },
            artifacts={
                name: tuple(artifact for each in outputs for artifact in each.artifacts[name])
                for name in dag.artifact_outputs
                if all(name in each.artifacts for each in outputs)
            },
        )


def root_task(name: str, component: ir.Component) -> ir.Task:
    """The task that stands for a whole pipeline."""
    nothing: Mapping[str, Any] = {}
    return ir.Task(
        name=name,
        path="pipelineSpec.root",
        component=component,
        parameters=nothing,
        artifacts=nothing,
        dependencies=frozenset(),
        condition=None,
        needs_success=True,
        enable_cache=False,
        retry=ir.RetryPolicy(),
        loop=None,
    )


def sources_in(group: Group, context: RunContext) -> Sources:
    """What a child of `group` can take its inputs from."""
    return Sources(
        parent=group.inputs,
        outputs_of=lambda name: group.children[name].outputs,
        final_status_of=lambda name: _final_status(group.children[name], context),
    )


def _final_status(node: Node, context: RunContext) -> dict[str, Any]:
    """The `PipelineTaskFinalStatus` message as JSON."""
    status: dict[str, Any] = {
        "state": (TaskState.SUCCEEDED if node.state.is_success else node.state).name,
        "pipelineJobResourceName": context.resource_name,
        "pipelineTaskName": node.task.name,
    }
    if node.life.error is not None:
        status["error"] = {"code": int(node.life.error.code), "message": node.life.error.message}
    return status


def group_error(failed: list[Node]) -> TaskError:
    """Why a group failed, in Vertex AI's words, followed by the first cause."""
    names = ", ".join(node.task.name for node in failed)
    cause = failed[0].life.error
    assert cause is not None
    message = f"The DAG failed because some tasks failed. The failed tasks are: [{names}]. "
    return TaskError(ErrorCode.FAILED_PRECONDITION, f"{message}{failed[0].task.name}: {cause.message}")
