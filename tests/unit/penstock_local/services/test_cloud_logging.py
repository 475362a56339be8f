from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud.logging_v2.types import ListLogEntriesRequest

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import InvalidArgumentError
from penstock_local.api.messages import to_json
from penstock_local.logs import LogStore
from penstock_local.services.cloud_logging import LoggingService
from penstock_local.services.names import Place

PINNED = 'resource.labels.job_id="1"'


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[LogStore]:
    store = LogStore(tmp_path / "logs")
    lines = [
        ("1", "workerpool0-0", "INFO", "one"),
        ("2", "workerpool0-0", "INFO", "elsewhere"),
        ("1", "workerpool1-0", "ERROR", "two"),
        ("1", "workerpool0-0", "INFO", '{"severity": "WARNING", "message": "three", "loss": NaN}'),
        ("1", "workerpool0-0", "INFO", '{"severity": "LOUD", "message": "four"}'),
        ("1", "workerpool0-0", "INFO", "{five"),
    ]
    for job_id, task_name, severity, line in lines:
        store.append(job_id=job_id, task_name=task_name, severity=severity, line=line)
    yield store
    store.close()


def entries(logs: LogStore, filter_: str = PINNED, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    request = ListLogEntriesRequest(resource_names=["projects/demo"], filter=filter_, **fields)
    told = to_json(
        LoggingService(logs, Place("demo", 42)).list_log_entries(request, CallContext(user_agent=""))
    )
    return told.get("entries", []), told.get("nextPageToken", "")


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [entry.get("textPayload") or entry["jsonPayload"]["message"] for entry in found]


def test_an_entry_is_filed_as_vertex_files_it(logs: LogStore) -> None:
    entry = entries(logs)[0][0]
    assert entry["logName"] == "projects/demo/logs/workerpool0-0"
    assert entry["resource"] == {
        "type": "ml_job",
        "labels": {"project_id": "demo", "job_id": "1", "task_name": "workerpool0-0"},
    }
    assert (entry["severity"], entry["textPayload"]) == ("INFO", "one")
    assert entry["timestamp"].endswith("Z")
    assert entry["insertId"]


def test_a_json_line_is_a_payload_that_may_carry_its_severity(logs: LogStore) -> None:
    warning, loud, broken = entries(logs)[0][2:]
    assert warning["severity"] == "WARNING"
    assert warning["jsonPayload"] == {"message": "three", "loss": "NaN"}  # JSON has no NaN
    assert (loud["severity"], loud["jsonPayload"]) == ("INFO", {"severity": "LOUD", "message": "four"})
    assert broken["textPayload"] == "{five"


@pytest.mark.parametrize(
    ("filter_", "expected"),
    [
        (PINNED, ["one", "two", "three", "four", "{five"]),
        (f'{PINNED} AND resource.labels.task_name="workerpool1-0"', ["two"]),
        (f"{PINNED} severity>=WARNING", ["two", "three"]),
        (f"{PINNED}\nOR\nresource.labels.job_id=2", ["one", "elsewhere", "two", "three", "four", "{five"]),
        (f"-{PINNED}", ["elsewhere"]),
        (f"NOT {PINNED}", ["elsewhere"]),
        ('resource.labels.job_id="3"', []),
        ("jsonPayload.message=three", ["three"]),
        ('textPayload:"els"', ["elsewhere"]),
        ('timestamp<"2020-01-01T00:00:00Z"', []),
        ("", ["one", "elsewhere", "two", "three", "four", "{five"]),
    ],
)
def test_entries_are_filtered_oldest_first(logs: LogStore, filter_: str, expected: list[str]) -> None:
    assert texts(entries(logs, filter_)[0]) == expected


def test_a_lower_bound_of_time_leaves_older_rows_unread(
    logs: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = [entry["timestamp"] for entry in entries(logs, "")[0]]
    read: list[int] = []
    rows = logs.rows
    monkeypatch.setattr(
        logs, "rows", lambda **given: [row for row in rows(**given) if not read.append(row[0])]
    )
    assert texts(entries(logs, f'{PINNED} AND timestamp>="{stamps[3]}"')[0]) == ["three", "four", "{five"]
    assert read == [4, 5, 6]
    assert texts(entries(logs, f'-(timestamp>="{stamps[3]}")')[0]) == ["one", "elsewhere", "two"]
    assert texts(entries(logs, f"-({PINNED})")[0]) == ["elsewhere"]


@pytest.mark.parametrize("order_by", ["timestamp asc", "timestamp desc"])
def test_pages_go_through_all_entries_in_order(logs: LogStore, order_by: str) -> None:
    told, token = entries(logs, order_by=order_by, page_size=2)
    while token:
        page, token = entries(logs, order_by=order_by, page_size=2, page_token=token)
        told += page
    expected = ["one", "two", "three", "four", "{five"]
    assert texts(told) == (expected if order_by.endswith("asc") else expected[::-1])


def test_a_page_that_is_full_and_the_last_has_no_successor(logs: LogStore) -> None:
    assert entries(logs, page_size=5)[1] == ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"order_by": "severity"}, "order_by 'severity'"),
        ({"page_token": "x"}, "page_token 'x'"),
        ({"page_size": -1}, "page_size is -1"),
        ({"resource_names": ["projects/other"]}, "'projects/other'"),
        ({"filter": "x"}, "filter 'x'"),
    ],
)
def test_a_request_that_makes_no_sense_is_invalid(logs: LogStore, fields: dict[str, Any], told: str) -> None:
    service = LoggingService(logs, Place("demo", 42))
    with pytest.raises(InvalidArgumentError, match=told):
        service.list_log_entries(ListLogEntriesRequest(**fields), CallContext(user_agent=""))


def test_the_last_lines_are_told_oldest_first(logs: LogStore) -> None:
    assert logs.last_lines(job_id="1", task_name="workerpool1-0", count=5) == ["two"]
    assert logs.last_lines(job_id="1", task_name="workerpool0-0", count=1) == ["{five"]
