"""Resources of the API, kept in SQLite: every create, update and delete is on disk before it is answered.

One place to wait for a change as well: a launcher that polls a job is held until the job is done.
"""

from __future__ import annotations

import datetime
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock_local.api.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from penstock_local.api.filters import parse_filter
from penstock_local.api.messages import deserialize, serialize, to_json

Message = TypeVar("Message")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS resource (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    parent TEXT NOT NULL,
    body BLOB NOT NULL,
    number INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS resource_by_parent ON resource (kind, parent, number);
CREATE TABLE IF NOT EXISTS counter (value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS text (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_PAGE_SIZE = 100


class ResourceStore:
    """Messages by resource name. Thread-safe; `wait_for` blocks, nothing else does for long."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(_SCHEMA)
        self._changed = threading.Condition(threading.RLock())

    def close(self) -> None:
        """Close the database; later calls fail."""
        with self._changed:
            self._connection.close()

    def next_id(self) -> str:
        """A numeric id as Vertex gives them: 19 digits, rising, never used before on this state."""
        with self._changed:
            row = self._connection.execute("SELECT max(value) FROM counter").fetchone()
            value = max(int(row[0] or 0) + 1, time.time_ns() // 1000 * 1000)
            self._connection.execute("DELETE FROM counter")
            self._connection.execute("INSERT INTO counter VALUES (?)", (value,))
            return str(value)

    def insert(self, message: Any, *, parent: str) -> None:
        """Keep a new resource under `message.name`. Raises AlreadyExistsError."""
        with self._changed:
            try:
                self._connection.execute(
                    "INSERT INTO resource VALUES (?, ?, ?, ?, (SELECT coalesce(max(number), 0) + 1 FROM resource))",
                    (message.name, type(message).__name__, parent, serialize(message)),
                )
            except sqlite3.IntegrityError as exc:
                raise AlreadyExistsError(f"{message.name} already exists.") from exc
            self._changed.notify_all()

    def get(self, message_type: type[Message], name: str) -> Message:
        """The resource. Raises NotFoundError."""
        with self._changed:
            row = self._connection.execute(
                "SELECT body FROM resource WHERE name = ? AND kind = ?", (name, message_type.__name__)
            ).fetchone()
        if row is None:
            raise NotFoundError(f"{message_type.__name__} {name} does not exist.")
        message: Message = deserialize(message_type, row[0])
        return message

    def update(self, message_type: type[Message], name: str, change: Callable[[Message], None]) -> Message:
        """Apply `change` to the resource, atomically. Raises NotFoundError."""
        with self._changed:
            message = self.get(message_type, name)
            change(message)
            self._connection.execute(
                "UPDATE resource SET body = ? WHERE name = ?", (serialize(message), name)
            )
            self._changed.notify_all()
            return message

    def delete(self, message_type: type[Any], name: str) -> None:
        """Forget the resource. Raises NotFoundError."""
        with self._changed:
            self.get(message_type, name)
            self._connection.execute("DELETE FROM resource WHERE name = ?", (name,))
            self._changed.notify_all()

    def all(self, message_type: type[Message], parent: str | None = None) -> Iterator[Message]:
        """Resources of a type, oldest first; with `parent`, only those below it."""
        condition, values = ("", ()) if parent is None else (" AND parent = ?", (parent,))
        with self._changed:
            rows = self._connection.execute(
                f"SELECT body FROM resource WHERE kind = ?{condition} ORDER BY number",  # noqa: S608  # constants only
                (message_type.__name__, *values),
            ).fetchall()
        for row in rows:
            yield deserialize(message_type, row[0])

    def get_text(self, key: str) -> str | None:
        """A text kept beside the resources, or None."""
        with self._changed:
            row = self._connection.execute("SELECT value FROM text WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put_text(self, key: str, value: str) -> None:
        """Keep a text under a key, replacing an earlier one."""
        with self._changed:
            self._connection.execute("INSERT OR REPLACE INTO text VALUES (?, ?)", (key, value))

    def wait_for(
        self, message_type: type[Message], name: str, done: Callable[[Message], bool], timeout_seconds: float
    ) -> Message:
        """Block until `done` holds for the resource or the time is up; returns it as it is then."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not done(message := self.get(message_type, name)):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            return message


def list_page(messages: Sequence[Any], request: Any) -> tuple[list[Any], str]:
    """The page of `messages` that a List request asks for, and the token of the next one.

    Honours `filter`, `order_by` (by create_time), `page_size` and `page_token`; raises InvalidArgumentError for a
    filter or an order that is not understood.
    """
    predicate = parse_filter(getattr(request, "filter", ""))
    found = [message for message in messages if predicate(to_json(message))]
    found = _ordered(found, getattr(request, "order_by", ""))
    start = page_position(request, default=0)
    end = start + (request.page_size or _PAGE_SIZE)
    return found[start:end], str(end) if end < len(found) else ""


def page_position(request: Any, *, default: int) -> int:
    """Where the page that a List request asks for begins. Raises InvalidArgumentError."""
    if request.page_size < 0:
        raise InvalidArgumentError(f"page_size is {request.page_size}; it must not be negative.")
    if request.page_token and not re.fullmatch(r"[0-9]+", request.page_token):
        raise InvalidArgumentError(f"page_token {request.page_token!r} is not one that was given out.")
    return int(request.page_token or default)


def now() -> datetime.datetime:
    """The time that resources are stamped with."""
    return datetime.datetime.now(datetime.UTC)


def _ordered(messages: list[Any], order_by: str) -> list[Any]:
    """Newest first unless asked otherwise, as Vertex lists."""
    field, _, direction = order_by.strip().partition(" ")
    if field not in ("", "create_time", "createTime", "timestamp") or direction.strip() not in (
        "",
        "asc",
        "desc",
    ):
        raise InvalidArgumentError(
            f"order_by {order_by!r} is not supported; allowed: `create_time` with asc or desc."
        )
    newest_first = not field or direction.strip() == "desc"
    return list(reversed(messages)) if newest_first else messages
