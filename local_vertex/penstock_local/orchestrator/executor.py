"""The seam to whatever runs containers: what it is told and what it answers."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


def view_root(work_dir: Path) -> Path:
    """The directory that stands for `/gcs` in the task that works in `work_dir`."""
    return work_dir / "gcs"


def path_in_view(root: Path, uri: str) -> str:
    """Where a task finds a gs:// URI: `ROOT/BUCKET/OBJECT`. Other URIs stay as they are."""
    return f"{root}/{uri[5:]}" if uri.startswith("gs://") else uri


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLaunch:
    """Everything that one attempt of one container task needs; all placeholders are resolved."""

    pipeline_job_name: str
    """Full resource name of the run."""
    component_name: str
    task_name: str
    task_id: str
    attempt: int
    """Counts from 1."""
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]
    executor_input: Mapping[str, Any]
    work_dir: Path
    """Exists; the same for all attempts of the task, so that a launcher finds what its predecessor wrote. The files
    named in the ExecutorInput's outputs are in it."""


@dataclass(frozen=True, slots=True)
class TaskExit:
    """How an attempt ended; exit code 0 is success."""

    exit_code: int
    message: str = ""
    """Shown after the exit code, for instance the last line of the log."""


class Executor(Protocol):
    """Runs containers. A Protocol so that the engine needs no process, Docker or network to be tested."""

    def run(self, launch: TaskLaunch, cancelled: threading.Event) -> TaskExit:
        """Blocks until the container has ended, and soon after `cancelled` is set.

        Called from a thread of its own per attempt. An exception counts as an internal error of the attempt.
        """
        ...
