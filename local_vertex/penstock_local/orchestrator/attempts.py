"""Attempts of container tasks: a thread for each that runs, a clock for each that is to be repeated."""

import heapq
import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from penstock_local.orchestrator.executor import Executor, TaskExit, TaskLaunch
from penstock_local.orchestrator.nodes import ContainerNode
from penstock_local.orchestrator.state import Attempt, ErrorCode, TaskError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The executor has answered for the last attempt of a task."""

    node: ContainerNode
    exit_code: int | None
    """None if the executor raised."""
    error: TaskError | None
    """None for exit code 0."""


class Attempts:
    """Starts attempts and collects their ends. All methods but `wake` belong to the engine's thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ended: queue.SimpleQueue[AttemptEnded | None] = queue.SimpleQueue()
        self._retries: list[tuple[float, int, ContainerNode]] = []

    def start(self, node: ContainerNode) -> None:
        """Starts the next attempt of `node` in a thread of its own."""
        assert node.plan is not None
        number = len(node.attempts) + 1
        node.attempts.append(Attempt(number=number, start_time=datetime.now(UTC)))
        launch = node.plan.attempt(number)
        name = f"{launch.task_name}-{launch.task_id}-{number}"
        threading.Thread(target=self._run, args=(node, launch), name=name, daemon=True).start()

    def retry_later(self, node: ContainerNode) -> float | None:
        """Schedules another attempt if the task's policy allows one, and returns the delay in seconds, else None.

        The new attempt is started by `wait`, once it is due and unless the task has been cancelled.
        """
        policy, failed = node.task.retry, len(node.attempts)
        if failed > policy.max_retries:
            return None
        delay_seconds = policy.delay_seconds(failed)
        heapq.heappush(self._retries, (time.monotonic() + delay_seconds, node.task_id, node))
        return delay_seconds

    def wait(self) -> AttemptEnded | ContainerNode | None:
        """Blocks until an attempt ends, a retry has been started (its task is returned), or `wake` (None)."""
        while self._retries and self._retries[0][2].cancelled.is_set():
            heapq.heappop(self._retries)
        timeout = max(0.0, self._retries[0][0] - time.monotonic()) if self._retries else None
        try:
            ended = self._ended.get(timeout=timeout)
        except queue.Empty:
            node = heapq.heappop(self._retries)[2]
            self.start(node)
            return node
        if ended is not None:
            self._record(ended)
        return ended

    def wake(self) -> None:
        """Makes `wait` return. Callable from any thread."""
        self._ended.put(None)

    def _run(self, node: ContainerNode, launch: TaskLaunch) -> None:
        try:
            self._ended.put(_ended(node, self._executor.run(launch, node.cancelled)))
        except Exception as exc:
            logger.exception("the executor failed on attempt %d of %s", launch.attempt, launch.task_name)
            error = TaskError(ErrorCode.INTERNAL, f"the executor failed: {type(exc).__name__}: {exc}")
            self._ended.put(AttemptEnded(node, None, error))

    def _record(self, ended: AttemptEnded) -> None:
        attempts = ended.node.attempts
        attempts[-1] = replace(
            attempts[-1], end_time=datetime.now(UTC), exit_code=ended.exit_code, error=ended.error
        )


def _ended(node: ContainerNode, task_exit: TaskExit) -> AttemptEnded:
    if task_exit.exit_code == 0:
        return AttemptEnded(node, 0, None)
    message = f"the container exited with code {task_exit.exit_code}"
    if task_exit.message:
        message = f"{message}: {task_exit.message}"
    return AttemptEnded(node, task_exit.exit_code, TaskError(ErrorCode.FAILED_PRECONDITION, message))
