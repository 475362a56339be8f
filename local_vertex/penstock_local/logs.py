"""What tasks and replicas print, kept by job in the order in which it came."""

from __future__ import annotations

import datetime
import sqlite3
import threading
from pathlib import Path
from typing import Any

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY,
    timestamp TEXT NOT NULL,
    job_id TEXT NOT NULL,
    task_name TEXT NOT NULL,
    severity TEXT NOT NULL,
    line TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS entry_by_job ON entry (job_id, id);
"""


class LogStore:
    """Lines in the order in which they came. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + _SCHEMA)
        self._lock = threading.Lock()

    def append(self, *, job_id: str, task_name: str, severity: str, line: str) -> None:
        """Keep one line. A line that is a JSON object may carry its own `severity`."""
        with self._lock:
            timestamp = datetime.datetime.now(datetime.UTC).isoformat()  # in the lock: rises with the id
            self._connection.execute(
                "INSERT INTO entry (timestamp, job_id, task_name, severity, line) VALUES (?, ?, ?, ?, ?)",
                (timestamp, job_id, task_name, severity, line),
            )

    def rows(
        self, *, job_id: str | None, since: datetime.datetime | None = None, after: int, ascending: bool
    ) -> list[tuple[Any, ...]]:
        """(id, timestamp, job id, task name, severity, line) from one side of position `after`, none before `since`."""
        comparison, order = (">", "ASC") if ascending else ("<", "DESC")
        conditions: dict[str, Any] = {f"id {comparison} ?": after}
        if job_id is not None:
            conditions["job_id = ?"] = job_id
        if since is not None:  # one zone and one form: texts compare as their times do
            conditions["timestamp >= ?"] = since.astimezone(datetime.UTC).isoformat()
        with self._lock:
            return self._connection.execute(
                f"SELECT * FROM entry WHERE {' AND '.join(conditions)} ORDER BY id {order}",  # noqa: S608  # constants only
                tuple(conditions.values()),
            ).fetchall()

    def last_lines(self, *, job_id: str, task_name: str, count: int) -> list[str]:
        """The last `count` lines of one replica or task, oldest first."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT line FROM entry WHERE job_id = ? AND task_name = ? ORDER BY id DESC LIMIT ?",
                (job_id, task_name, count),
            ).fetchall()
        return [row[0] for row in reversed(rows)]

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()
