"""The states of a task, the moves between them, and what is told to the outside about a task."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock_local.orchestrator.inputs import Values


class TaskState(enum.IntEnum):
    """Values are those of `PipelineTaskDetail.State`; its CANCEL_PENDING never lasts here."""

    PENDING = 1
    RUNNING = 2
    SUCCEEDED = 3
    CANCELLING = 5
    CANCELLED = 6
    FAILED = 7
    SKIPPED = 8
    """The outputs came from the cache."""
    NOT_TRIGGERED = 9

    @property
    def is_final(self) -> bool:
        """Whether the task has ended; nothing leaves such a state."""
        return not MOVES[self]

    @property
    def is_success(self) -> bool:
        """Whether the task has ended and its outputs exist."""
        return self in (TaskState.SUCCEEDED, TaskState.SKIPPED)


MOVES: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset(
        {TaskState.RUNNING, TaskState.SKIPPED, TaskState.NOT_TRIGGERED, TaskState.CANCELLED, TaskState.FAILED}
    ),
    TaskState.RUNNING: frozenset(
        {
            TaskState.SUCCEEDED,
            TaskState.FAILED,
            TaskState.CANCELLING,
            TaskState.CANCELLED,
        }
    ),
    # Whatever a task does after it was told to stop, it was cancelled: GCPC launchers exit with 0 on SIGTERM.
    TaskState.CANCELLING: frozenset({TaskState.CANCELLED}),
    TaskState.SUCCEEDED: frozenset(),
    TaskState.CANCELLED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.SKIPPED: frozenset(),
    TaskState.NOT_TRIGGERED: frozenset(),
}


class ErrorCode(enum.IntEnum):
    """The `google.rpc.Code` values that tasks end with."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    FAILED_PRECONDITION = 9
    INTERNAL = 13


@dataclass(frozen=True, slots=True)
class TaskError:
    """Why a task did not succeed."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of a container."""

    number: int
    """Counts from 1."""
    start_time: datetime
    end_time: datetime | None = None
    exit_code: int | None = None
    """None while it runs, or if the executor itself failed."""
    error: TaskError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSnapshot:
    """What `PipelineTaskDetail` shows of a task at one moment."""

    task_id: int
    parent_task_id: int | None
    """None for the task that stands for the whole pipeline."""
    task_name: str
    component_name: str
    state: TaskState
    create_time: datetime
    start_time: datetime | None
    end_time: datetime | None
    error: TaskError | None
    inputs: Values
    outputs: Values
    attempts: tuple[Attempt, ...]


class TaskLife:
    """The state of one task and when it changed. `move` is the only way to change it."""

    def __init__(self) -> None:
        self.state = TaskState.PENDING
        self.error: TaskError | None = None
        self.create_time = datetime.now(UTC)
        self.start_time: datetime | None = None
        self.end_time: datetime | None = None

    def move(self, to: TaskState, error: TaskError | None = None) -> None:
        """Enters `to` and stamps the time. Raises `ValueError` for a move that the table does not allow."""
        if to not in MOVES[self.state]:
            allowed = ", ".join(state.name for state in sorted(MOVES[self.state])) or "none, it has ended"
            raise ValueError(f"a {self.state.name} task cannot become {to.name}; allowed: {allowed}")
        self.state = to
        self.error = error
        now = datetime.now(UTC)
        if to is TaskState.RUNNING:
            self.start_time = now
        if to.is_final:
            self.end_time = now
