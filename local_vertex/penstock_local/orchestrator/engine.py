"""Runs one pipeline to its end: one thread decides, one thread per running container waits.

Only the thread inside `PipelineRun.run` touches the tree of tasks. Executors answer through a queue, so nothing here
needs a lock, and every change happens in one order, in which the listener hears of it.
"""

import enum
import logging
import random
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.attempts import AttemptEnded, Attempts
from penstock_local.orchestrator.cache import Cache, cache_key
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.errors import OutputError, TaskFailedError
from penstock_local.orchestrator.executor import Executor
from penstock_local.orchestrator.inputs import Inputs, Values, resolve_inputs
from penstock_local.orchestrator.launch import import_artifact, plan_container, task_scope
from penstock_local.orchestrator.nodes import (
    ContainerNode,
    DagNode,
    Group,
    LoopNode,
    Node,
    group_error,
    root_task,
    sources_in,
)
from penstock_local.orchestrator.placeholders import Scope
from penstock_local.orchestrator.spec import Pipeline
from penstock_local.orchestrator.state import ErrorCode, TaskError, TaskSnapshot, TaskState

logger = logging.getLogger(__name__)

_CANCELLED = TaskError(ErrorCode.CANCELLED, "the pipeline was cancelled")


class FailurePolicy(enum.Enum):
    """What a failed task means for the others."""

    SLOW = "SLOW"
    """Everything that does not depend on it still runs."""
    FAST = "FAST"
    """Nothing new starts, apart from exit tasks; what runs goes on to its end, retries included."""


class Listener(Protocol):
    """Hears of every change. A Protocol because the service stores what it hears, and the engine stores nothing."""

    def task_changed(self, task: TaskSnapshot) -> None:
        """Called from the thread inside `run`, in the order of the changes. An exception ends the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: SUCCEEDED, FAILED or CANCELLED."""

    state: TaskState
    error: TaskError | None
    outputs: Values


class PipelineRun:
    """One run of a pipeline. `run` may be called once; `cancel` from any thread, any number of times."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        context: RunContext,
        parameters: Mapping[str, Any],
        executor: Executor,
        cache: Cache,
        listener: Listener,
        work_dir: Path,
        failure_policy: FailurePolicy = FailurePolicy.SLOW,
    ) -> None:
        """`parameters` are those of `Pipeline.resolve_parameters`."""
        self._pipeline = pipeline
        self._context = context
        self._parameters = parameters
        self._cache = cache
        self._listener = listener
        self._work_dir = work_dir
        self._failure_policy = failure_policy
        self._attempts = Attempts(executor)
        self._root = DagNode(root_task(context.job_id, pipeline.root), _new_task_id(), None)
        self._to_advance: deque[Group] = deque()
        self._has_failed = False
        self._cancel_requested = threading.Event()
        self._stop_requested = threading.Event()

    def run(self) -> RunOutcome:
        """Blocks until every task has ended. Failed tasks are part of the outcome; only defects of ours raise."""
        try:
            self._start(self._root)
            self._apply_cancellation()
            while True:
                while self._to_advance:
                    self._advance(self._to_advance.popleft())
                if self._root.state.is_final:
                    break
                self._wait()
        finally:
            for node in self._root.walk():
                if isinstance(node, ContainerNode):
                    node.cancelled.set()
        return RunOutcome(self._root.state, self._root.life.error, self._root.outputs)

    def cancel(self, *, exit_tasks_too: bool = False) -> None:
        """Asks the run to end: pending tasks end CANCELLED, running ones are told to stop. Does not block.

        Exit tasks still run and are left alone, unless `exit_tasks_too` is set, as by a server that shuts down.
        """
        if exit_tasks_too:
            self._stop_requested.set()
        self._cancel_requested.set()
        self._attempts.wake()

    # Events.

    def _wait(self) -> None:
        match self._attempts.wait():
            case None:
                self._apply_cancellation()
            case AttemptEnded() as ended:
                self._attempt_ended(ended)
            case ContainerNode() as retried:
                self._tell(retried)

    def _apply_cancellation(self) -> None:
        if not self._cancel_requested.is_set():
            return
        for node in list(self._root.walk()):
            if node.state is TaskState.RUNNING and self._must_stop(node):
                self._move(node, TaskState.CANCELLING, _CANCELLED)
                if isinstance(node, ContainerNode):
                    node.cancelled.set()
                    if not node.has_open_attempt:
                        self._end(node, TaskState.CANCELLED, _CANCELLED)
        self._advance_everything()

    def _must_stop(self, node: Node) -> bool:
        return self._stop_requested.is_set() or (self._cancel_requested.is_set() and not node.is_exit)

    def _attempt_ended(self, ended: AttemptEnded) -> None:
        node, error = ended.node, ended.error
        if node.state is TaskState.CANCELLING:
            self._end(node, TaskState.CANCELLED, _CANCELLED)
            return
        if error is None:
            assert node.plan is not None
            try:
                node.outputs = node.plan.read_outputs()
            except OutputError as exc:
                error = TaskError(ErrorCode.FAILED_PRECONDITION, str(exc))
        if error is None:
            if node.cache_key is not None:
                self._cache.put(node.cache_key, node.outputs)
            self._end(node, TaskState.SUCCEEDED)
            return
        delay_seconds = self._attempts.retry_later(node)
        if delay_seconds is None:
            self._end(node, TaskState.FAILED, error)
        else:
            logger.info("%s: %s; next attempt in %g s", node.task.name, error.message, delay_seconds)
            self._tell(node)

    # Groups.

    def _open(self, group: Group, children: list[Node]) -> None:
        group.children = {child.task.name: child for child in children}
        self._move(group, TaskState.RUNNING)
        for child in children:
            self._tell(child)
        self._to_advance.append(group)

    def _advance(self, group: Group) -> None:
        """Starts or ends the children that need not wait any longer, and ends the group after the last of them."""
        if group.state is TaskState.PENDING or group.state.is_final:
            return  # a group that has not been opened has no children yet
        for child in group.in_state(TaskState.PENDING):
            self._advance_child(group, child)
        if all(child.state.is_final for child in group.children.values()):
            self._close(group)

    def _advance_everything(self) -> None:
        self._to_advance.extend(node for node in self._root.walk() if isinstance(node, Group))

    def _advance_child(self, group: Group, child: Node) -> None:
        upstream = [group.children[name].state for name in child.task.dependencies]
        if self._must_stop(child):
            self._end(child, TaskState.CANCELLED, _CANCELLED)
        elif self._has_failed and self._failure_policy is FailurePolicy.FAST and not child.is_exit:
            self._end(child, TaskState.NOT_TRIGGERED)
        elif not all(state.is_final for state in upstream) or group.is_full:
            return
        elif child.task.needs_success and not all(state.is_success for state in upstream):
            self._end(child, TaskState.NOT_TRIGGERED)
        else:
            self._start(child)

    def _close(self, group: Group) -> None:
        failed = group.in_state(TaskState.FAILED)
        if group.state is TaskState.CANCELLING:
            self._end(group, TaskState.CANCELLED, _CANCELLED)
        elif failed:
            self._end(group, TaskState.FAILED, group_error(failed))
        else:
            group.outputs = group.collect()
            self._end(group, TaskState.SUCCEEDED)

    # One task.

    def _start(self, node: Node) -> None:
        try:
            self._resolve(node)
            if node.task.condition is None or node.task.condition.is_true(node.inputs.parameters):
                self._execute(node)
            else:
                self._end(node, TaskState.NOT_TRIGGERED)
        except TaskFailedError as exc:
            self._end(node, TaskState.FAILED, TaskError(ErrorCode.INVALID_ARGUMENT, str(exc)))

    def _resolve(self, node: Node) -> None:
        """Fills in what flows into `node`."""
        task, context = node.task, self._context
        if node.parent is None:
            scope = Scope(constants=context.placeholders())
            node.inputs = Inputs(parameters=scope.resolve(self._parameters))
        elif isinstance(node, ContainerNode) and isinstance(task.component.implementation, ir.Container):
            sources = sources_in(node.parent, context)
            node.plan = plan_container(task, context, sources, task_id=node.task_id, work_dir=self._work_dir)
            node.inputs = node.plan.inputs
        elif not isinstance(node.parent, LoopNode):
            scope = task_scope(context, task.name, node.task_id)
            node.inputs = resolve_inputs(task, sources_in(node.parent, context), scope)

    def _execute(self, node: Node) -> None:
        if isinstance(node, LoopNode):
            self._open(node, [_iteration(node, task, inputs) for task, inputs in node.iterations()])
        elif isinstance(node, DagNode):
            dag = node.task.component.implementation
            assert isinstance(dag, ir.Dag)
            self._open(node, [_new_node(task, node) for task in dag.tasks.values()])
        elif isinstance(node, ContainerNode) and node.plan is not None:
            self._run_container(node)
        else:
            self._move(node, TaskState.RUNNING)
            node.outputs = import_artifact(node.task, self._context, node.inputs, task_id=node.task_id)
            self._end(node, TaskState.SUCCEEDED)

    def _run_container(self, node: ContainerNode) -> None:
        assert node.plan is not None
        if node.task.enable_cache:
            node.cache_key = cache_key(self._pipeline.name, node.task.component, node.inputs)
            outputs = self._cache.get(node.cache_key)
            if outputs is not None:
                node.outputs = outputs
                self._end(node, TaskState.SKIPPED)
                return
        node.plan.prepare_work_dir()
        self._attempts.start(node)
        self._move(node, TaskState.RUNNING)

    def _end(self, node: Node, state: TaskState, error: TaskError | None = None) -> None:
        self._move(node, state, error)
        if node.parent is not None:
            self._to_advance.append(node.parent)
        if state is TaskState.FAILED and not self._has_failed:
            self._has_failed = True
            self._advance_everything()

    def _move(self, node: Node, state: TaskState, error: TaskError | None = None) -> None:
        node.life.move(state, error)
        logger.info("%s: %s%s", node.task.name, state.name, f" ({error.message})" if error else "")
        self._tell(node)

    def _tell(self, node: Node) -> None:
        self._listener.task_changed(node.snapshot())


def _new_task_id() -> int:
    return random.getrandbits(63)


def _new_node(task: ir.Task, parent: Group) -> Node:
    if task.loop is not None:
        return LoopNode(task, _new_task_id(), parent)
    is_dag = isinstance(task.component.implementation, ir.Dag)
    return (DagNode if is_dag else ContainerNode)(task, _new_task_id(), parent)


def _iteration(loop: LoopNode, task: ir.Task, inputs: Inputs) -> DagNode:
    node = DagNode(task, _new_task_id(), loop)
    node.inputs = inputs
    return node
