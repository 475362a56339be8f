"""google.logging.v2.LoggingServiceV2: the lines of tasks and replicas, served by entries:list.

The labels are those under which Vertex files a CustomJob's lines: resource type `ml_job`, `job_id`, `task_name`
(documented for CustomJobs). That a pipeline task's lines are filed by the same labels, under the id of its main job, is our
reading: that main job is a CustomJob.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

from google.cloud.logging_v2.types import LogEntry, logging

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import InvalidArgumentError
from penstock_local.api.filters import SEVERITIES, parse_filter
from penstock_local.api.messages import from_json
from penstock_local.logs import LogStore
from penstock_local.services.names import Place
from penstock_local.services.resources import page_position

_PAGE_SIZE = 50
_PINNED_JOB = re.compile(r'(?<![-.\w])resource\.labels\.job_id="(\d+)"')
_SINCE = re.compile(r'(?<![-.\w])timestamp>=?"([^"]+)"')
_WIDENING = re.compile(r"\b(?:OR|NOT)\b|-\s*\(")


class LoggingService:
    """google.logging.v2.LoggingServiceV2, reading only."""

    def __init__(self, logs: LogStore, place: Place) -> None:
        self._logs = logs
        self._place = place

    def list_log_entries(self, request: logging.ListLogEntriesRequest, _: CallContext) -> Any:
        """Entries that match the filter, oldest first unless `timestamp desc` is asked for."""
        if request.order_by not in ("", "timestamp", "timestamp asc", "timestamp desc"):
            raise InvalidArgumentError(
                f"order_by {request.order_by!r}: allowed are `timestamp asc` and `timestamp desc`."
            )
        for name in request.resource_names:
            if name not in self._place.project_names:
                raise InvalidArgumentError(
                    f"resourceNames has {name!r}; this stand-in serves projects/{self._place.project_id}."
                )
        ascending = not request.order_by.endswith("desc")
        predicate = parse_filter(request.filter)
        after = page_position(request, default=0 if ascending else 1 << 62)
        rows = self._logs.rows(
            job_id=_job_id_in(request.filter),
            since=_since_in(request.filter),
            after=after,
            ascending=ascending,
        )
        page_size = request.page_size or _PAGE_SIZE
        entries: list[LogEntry] = []
        for row in rows:
            entry = self._entry(row)
            if predicate(entry):
                if len(entries) == page_size:
                    return logging.ListLogEntriesResponse(
                        entries=entries, next_page_token=entries[-1].insert_id
                    )
                entries.append(from_json(LogEntry, entry))
        return logging.ListLogEntriesResponse(entries=entries)

    def _entry(self, row: tuple[Any, ...]) -> dict[str, Any]:
        number, timestamp, job_id, task_name, severity, line = row
        payload = _json_object(line)
        if payload is not None and payload.get("severity") in SEVERITIES:
            severity = payload.pop("severity")
        return {
            "logName": f"projects/{self._place.project_id}/logs/{task_name}",
            "resource": {
                "type": "ml_job",
                "labels": {"project_id": self._place.project_id, "job_id": job_id, "task_name": task_name},
            },
            "timestamp": timestamp,
            "severity": severity,
            "insertId": f"{number:020d}",
            **({"textPayload": line} if payload is None else {"jsonPayload": payload}),
        }


def _json_object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        told = json.loads(line, parse_constant=str)  # JSON has no NaN, and readers choke on it
    except json.JSONDecodeError:
        return None
    return told if isinstance(told, dict) else None


def _job_id_in(text: str) -> str | None:
    """The job id that the filter pins, to read only that job's rows; None reads all."""
    match = _PINNED_JOB.search(text)
    return match[1] if match and not _WIDENING.search(text) else None


def _since_in(text: str) -> datetime.datetime | None:
    """A time before which no entry matches the filter, to leave the older rows unread; None reads all."""
    match = _SINCE.search(text)
    if match is None or _WIDENING.search(text):
        return None
    try:
        time = datetime.datetime.fromisoformat(match[1])
    except ValueError:
        return None  # compared as text, as any other value
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
