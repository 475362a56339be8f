"""Log lines of tasks and replicas, read from Cloud Logging by the id of the job that wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock_pipelines.errors import ServiceError

_ENTRIES_LIST = "https://logging.googleapis.com/v2/entries:list"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class LogLine:
    """One entry."""

    insert_id: str
    timestamp: str
    severity: str
    replica: str
    """Such as `workerpool0-0`."""
    payload: Any
    """Fields of a structured line, or the text of another one."""

    @property
    def text(self) -> str:
        """What a person reads of it."""
        return (
            str(self.payload.get("message", self.payload))
            if isinstance(self.payload, dict)
            else str(self.payload)
        )


@dataclass
class LogReader:
    """Reads the entries of one project."""

    project: str
    _session: Any = None
    _seen: dict[str, tuple[str, set[str]]] = field(default_factory=dict)

    def lines(self, job_id: str) -> Iterator[LogLine]:
        """All lines of a job, oldest first. Raises ServiceError."""
        yield from self._read(f'resource.type="ml_job" AND resource.labels.job_id="{job_id}"')

    def new_lines(self, job_id: str) -> Iterator[LogLine]:
        """The lines of a job that an earlier call has not given, oldest first. Raises ServiceError."""
        since, known = self._seen.get(job_id, ("", set()))
        condition = f' AND timestamp>="{since}"' if since else ""
        for line in self._read(f'resource.type="ml_job" AND resource.labels.job_id="{job_id}"{condition}'):
            if line.insert_id not in known:
                # Entries of one instant come again with the next call; those of earlier instants do not.
                known = {*known, line.insert_id} if line.timestamp == since else {line.insert_id}
                since = line.timestamp
                yield line
        self._seen[job_id] = (since, known)

    def _read(self, text: str) -> Iterator[LogLine]:
        body = {
            "resourceNames": [f"projects/{self.project}"],
            "filter": text,
            "orderBy": "timestamp asc",
            "pageSize": _PAGE_SIZE,
        }
        while True:
            page = self._post(body)
            for entry in page.get("entries", ()):
                yield _line(entry)
            if not page.get("nextPageToken"):
                return
            body["pageToken"] = page["nextPageToken"]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        import requests

        try:
            response = self._authorized().post(_ENTRIES_LIST, json=body, timeout=60)
        except requests.RequestException as exc:
            raise ServiceError(f"Cloud Logging did not answer: {exc}") from exc
        if response.status_code != 200:
            raise ServiceError(f"Cloud Logging refused to list entries: {response.text[:500]}")
        told: dict[str, Any] = response.json()
        return told

    def _authorized(self) -> Any:
        if self._session is None:
            import google.auth
            from google.auth.transport.requests import AuthorizedSession

            credentials, _ = google.auth.default(scopes=[_SCOPE])
            self._session = AuthorizedSession(credentials)
        return self._session


def _line(entry: dict[str, Any]) -> LogLine:
    labels = entry.get("resource", {}).get("labels", {})
    return LogLine(
        insert_id=entry.get("insertId", ""),
        timestamp=entry.get("timestamp", ""),
        severity=entry.get("severity", "DEFAULT"),
        replica=labels.get("task_name", ""),
        payload=entry.get("jsonPayload", entry.get("textPayload", "")),
    )
