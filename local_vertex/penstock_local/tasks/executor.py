"""Runs container tasks as processes: the orchestrator's Executor over the image map."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock_local.jobs.images import ImageMap
from penstock_local.jobs.processes import ManagedProcess, ProcessRecord, base_environment
from penstock_local.jobs.runner import GRACE_SECONDS
from penstock_local.logs import LogStore
from penstock_local.orchestrator.executor import TaskExit, TaskLaunch, view_root
from penstock_local.storage import ObjectStore
from penstock_local.tasks.gcs_view import GcsView, gcs_view

TASK_REPLICA = "workerpool0-0"
"""The name under which a task's lines are filed. Our reading: ContainerDetail.main_job is documented as the name of the
CustomJob that runs the task's container, and a CustomJob's lines are filed by replica."""
_LIGHTWEIGHT_MODULE = "kfp.dsl.executor_main"
_HOOK = Path(__file__).parent / "startup_hook"
_LAST_LINES = 20


def main_job_id(task_id: str, attempt: int) -> str:
    """The id of the CustomJob that would run an attempt on Vertex; its lines are filed under it.

    A number of its own for each attempt, so that a client which takes the task's id for it fails here too.
    """
    digest = hashlib.sha256(f"{task_id}/{attempt}".encode()).digest()
    return str(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True, slots=True)
class ProcessExecutor:
    """One for a stand-in; see the Protocol `Executor`."""

    images: ImageMap
    logs: LogStore
    objects: ObjectStore
    record: ProcessRecord
    client_environment: Mapping[str, str]

    def run(self, launch: TaskLaunch, cancelled: threading.Event) -> TaskExit:
        """Block until the program has ended; SIGTERM to it when `cancelled` is set, SIGKILL after the grace."""
        image = self.images.resolve(launch.image)
        job_id = main_job_id(launch.task_id, launch.attempt)
        with self._view(launch) as view:
            hook = {"PENSTOCK_GCS_VIEW": str(view.root), "PYTHONPATH": str(_HOOK)} if view else {}
            process = ManagedProcess(
                image.command_line(launch.command, launch.args),
                env={
                    **base_environment(image.python),
                    **self.client_environment,
                    **image.env,
                    **hook,
                    **launch.env,
                },
                cwd=launch.work_dir,
                sink=lambda severity, line: self._log(job_id, severity, line),
                record=self.record,
            )
            code = _wait(process, cancelled)
            if code == 0 and view:
                view.bring_out(launch.executor_input)
        return TaskExit(code, self._told(job_id, code))

    @contextlib.contextmanager
    def _view(self, launch: TaskLaunch) -> Iterator[GcsView | None]:
        """A view of the buckets for a task that knows a path in it; other containers work with gs:// URIs."""
        root = view_root(launch.work_dir)
        marks = (_LIGHTWEIGHT_MODULE, str(root))
        strings = (*launch.command, *launch.args, *launch.env.values())
        if not any(mark in text for text in strings for mark in marks):
            yield None
            return
        with gcs_view(root, self.objects, launch.executor_input) as view:
            yield view

    def _told(self, job_id: str, code: int) -> str:
        if code == 0:
            return ""
        lines = self.logs.last_lines(job_id=job_id, task_name=TASK_REPLICA, count=_LAST_LINES)
        return "\n".join(lines)

    def _log(self, job_id: str, severity: str, line: str) -> None:
        self.logs.append(job_id=job_id, task_name=TASK_REPLICA, severity=severity, line=line)


def _wait(process: ManagedProcess, cancelled: threading.Event) -> int:
    """The exit code. A second thread turns `cancelled` into signals."""
    ended = threading.Event()

    def stop_on_cancel() -> None:
        while not ended.is_set():
            if cancelled.wait(0.2):
                process.stop(GRACE_SECONDS)
                return

    threading.Thread(target=stop_on_cancel, daemon=True).start()
    code = process.wait()
    ended.set()  # the thread follows within its 0.2 s; a task need not wait for that
    return code
