"""What a service has running: a thread for each job, until all are cancelled at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock_local.api.errors import UnavailableError

Run = TypeVar("Run")


@dataclass
class RunningJobs(Generic[Run]):
    """Runs by resource name. Thread-safe."""

    _runs: dict[str, tuple[Run, threading.Thread]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_shut_down: bool = False

    def start(
        self, name: str, run: Run, *, insert: Callable[[], None], follow: Callable[[str, Run], None]
    ) -> None:
        """Keep the resource with `insert`, then call `follow` in a thread. Raises UnavailableError after `shut_down`."""

        def follow_to_end() -> None:
            try:
                follow(name, run)
            finally:
                with self._lock:
                    del self._runs[name]

        thread = threading.Thread(target=follow_to_end, name=name.rpartition("/")[2], daemon=True)
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the stand-in is shutting down.")
            insert()
            self._runs[name] = run, thread
            thread.start()

    def get(self, name: str) -> Run | None:
        """The run of a job that has not ended, else None."""
        with self._lock:
            return self._runs[name][0] if name in self._runs else None

    def shut_down(self, cancel: Callable[[Run], None]) -> None:
        """Start nothing more, cancel every run and block until all have ended."""
        with self._lock:
            self._is_shut_down = True
            running = list(self._runs.values())
        for run, _ in running:
            cancel(run)
        for _, thread in running:
            thread.join()
