"""Faults over the control API: what becomes of processes, replicas and storage requests of a job that they are for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
import requests

from contract.vertex.stand_in import BUCKET, IMAGE, Rest

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
SLEEP = "import time; print('here', flush=True); time.sleep(60)"
_COUNT = itertools.count()

# The replica's child says when it was killed; the replica itself goes on and ends when told so by its exit code.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "worker"], env={**os.environ, "RANK": "3"})
print("started", flush=True)
print("child ended with", child.wait(), flush=True)
"""
# Ends when it is told to, and says whether it has run before.
SAVES = """
import pathlib, signal, sys, time
again = pathlib.Path("was here").exists()
pathlib.Path("was here").touch()
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(134)))
print("again" if again else "first", flush=True)
time.sleep({seconds})
"""
STEPS = """
import json, time
for step in range(1, 40):
    print(json.dumps({"event": "step", "step": step}), flush=True)
    time.sleep(0.05)
"""
# What is stopped ends with SIGKILL alone, after 30 s of grace, if it is the container's first process.
STEPS_BELOW = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STEPS!r}, 'steps'])"


def submit(rest: Rest, *programs: str, faults: Any) -> tuple[str, str]:
    """(job, label of its order)."""
    label = f"order-{next(_COUNT)}"
    rest.control("POST", "faults", {"labels": {"order": label}, "faults": faults})
    pools = [
        {
            "machineSpec": {"machineType": "n1-standard-4"},
            "replicaCount": "1",
            "containerSpec": {"imageUri": IMAGE, "command": ["python", "-c", program]},
        }
        for program in programs
    ]
    job = {"displayName": label, "labels": {"order": label}, "jobSpec": {"workerPoolSpecs": pools}}
    return rest.call("POST", JOBS, job)["name"], label


def states(rest: Rest, label: str) -> Any:
    [order] = [
        order for order in rest.control("GET", "faults")["orders"] if order["labels"] == {"order": label}
    ]
    return order["faults"]


def wait_for_state(rest: Rest, label: str, state: str) -> Any:
    deadline = time.monotonic() + 20
    while (found := states(rest, label)[0])["state"] != state:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def cancel(rest: Rest, job: str) -> None:
    rest.call("POST", f"v1/{job}:cancel", {})
    rest.wait_until(job, "CANCELLED")


@contextmanager
def stormy(rest: Rest, **fault: Any) -> Iterator[str]:
    """The label of an order for a storage fault that is at work."""
    job, label = submit(rest, SLEEP, faults=[{"do": "storage", "at_start": True, **fault}])
    wait_for_state(rest, label, "struck")
    yield label
    cancel(rest, job)


def url(name: str) -> str:
    return f"https://storage.googleapis.com/{BUCKET}/{name}"


def test_a_bad_order_is_refused_with_its_field(rest: Rest) -> None:
    body = {"faults": [{"do": "restart-job", "at_step": "soon"}]}
    answer = rest.session.post(f"{rest.control_url}/faults", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("faults[0].at_step is 'soon'")
    assert rest.session.post(f"{rest.control_url}/faults", data="not JSON").status_code == 400


def test_only_the_process_that_matches_is_killed(rest: Rest) -> None:
    fault = {"do": "kill", "command": "worker$", "environment": {"RANK": "3"}, "after_seconds": 0.1}
    job, label = submit(rest, PARENT, faults=[fault])
    rest.wait_until(job, "SUCCEEDED")
    assert "child ended with -9" in rest.lines(job)
    [told] = states(rest, label)
    assert told["state"] == "over"
    assert told["what"].startswith("SIGKILL to process")


def test_a_fault_at_a_step_strikes_with_that_line(rest: Rest) -> None:
    job, label = submit(rest, STEPS_BELOW, faults=[{"do": "hang", "command": "steps$", "at_step": 5}])
    told = wait_for_state(rest, label, "over")
    assert told["step"] == 5
    assert any("fault injected: SIGSTOP to process" in line for line in rest.lines(job))
    time.sleep(0.3)
    stopped = len(rest.lines(job))
    time.sleep(0.3)
    assert len(rest.lines(job)) == stopped < 40
    cancel(rest, job)


def test_a_node_that_is_taken_away_takes_its_disk_along_and_the_job_begins_anew(rest: Rest) -> None:
    fault = {"do": "preempt", "replica": "workerpool1-0", "after_seconds": 1}
    job, _ = submit(rest, SAVES.format(seconds=60), SAVES.format(seconds=60), faults=[fault])
    rest.wait_for_line(job, "workerpool0-0", "again")
    deadline = time.monotonic() + 20
    while (worker := rest.lines(job, "workerpool1-0")).count("first") < 2:
        assert time.monotonic() < deadline, worker
        time.sleep(0.05)
    assert "saved" not in worker  # without notice
    assert "saved" in rest.lines(job, "workerpool0-0")
    assert "the node of workerpool1-0 was preempted" in worker
    assert "workerpool1-0 ended with status 137; the whole job restarts" in worker
    cancel(rest, job)


def test_a_node_that_is_taken_away_with_notice_can_save(rest: Rest) -> None:
    fault = {"do": "preempt", "replica": "workerpool0-0", "after_seconds": 1, "notice_seconds": 20}
    job, _ = submit(rest, SAVES.format(seconds=60), faults=[fault])
    rest.wait_for_line(job, "workerpool0-0", "saved")
    deadline = time.monotonic() + 20
    while (lines := rest.lines(job)).count("first") < 2:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    cancel(rest, job)


def test_a_restart_ends_all_replicas_and_starts_them_again(rest: Rest) -> None:
    job, _ = submit(
        rest,
        SAVES.format(seconds=60),
        SAVES.format(seconds=60),
        faults=[{"do": "restart-job", "after_seconds": 1}],
    )
    for replica in ("workerpool0-0", "workerpool1-0"):
        lines = rest.wait_for_line(job, replica, "again")
        assert "saved" not in lines
    cancel(rest, job)


def test_a_replica_that_starts_late_does_so_once(rest: Rest) -> None:
    late = {"do": "delay-start", "replica": "workerpool1-0", "seconds": 1.5}
    job, label = submit(rest, SLEEP, SLEEP, faults=[late])
    rest.wait_for_line(job, "workerpool0-0", "here")
    assert rest.lines(job, "workerpool1-0") == ["fault injected: workerpool1-0 starts 1.5 s late"]
    rest.wait_for_line(job, "workerpool1-0", "here")
    assert states(rest, label)[0]["state"] == "over"
    cancel(rest, job)


def test_a_job_that_is_cancelled_before_a_late_replica_starts_leaves_none(rest: Rest) -> None:
    late = {"do": "delay-start", "replica": "workerpool1-0", "seconds": 1}
    job, _ = submit(rest, SLEEP, SLEEP, faults=[late])
    rest.wait_for_line(job, "workerpool0-0", "here")
    cancel(rest, job)
    time.sleep(1.2)
    assert len(rest.lines(job, "workerpool1-0")) == 1


def test_requests_are_refused_in_the_words_of_both_apis_until_the_count_is_reached(rest: Rest) -> None:
    json_url = f"https://storage.googleapis.com/storage/v1/b/{BUCKET}/o/stormy%2Fa"
    with stormy(rest, kind="refuse", status=429, match="/stormy/", requests=2) as label:
        put = rest.session.put(url("stormy/a"), data=b"x")
        assert (put.status_code, "fault injected" in put.text) == (429, True)
        got = rest.session.get(json_url)
        assert (got.status_code, got.json()["error"]["code"]) == (429, 429)
        assert rest.session.put(url("stormy/a"), data=b"x").status_code == 200
        assert rest.session.get(json_url).status_code == 200
        assert states(rest, label)[0]["requests"] == 2


def test_a_read_only_bucket_refuses_writes_alone(rest: Rest) -> None:
    rest.session.put(url("kept/a"), data=b"x").raise_for_status()
    with stormy(rest, kind="read-only", match="/kept/"):
        refused = rest.session.put(url("kept/a"), data=b"y")
        assert refused.status_code == 403
        assert "AccessDenied" in refused.text
        assert rest.session.delete(url("kept/a")).status_code == 403
        assert rest.session.get(url("kept/a")).content == b"x"
        assert rest.session.put(url("elsewhere/a"), data=b"y").status_code == 200
    assert rest.session.put(url("kept/a"), data=b"y").status_code == 200  # the job has ended


def test_a_connection_is_cut_in_the_middle_of_a_body(rest: Rest) -> None:
    payload = bytes(3 << 20)
    rest.session.put(url("cut/a"), data=payload).raise_for_status()
    with stormy(rest, kind="reset", match="/cut/", requests=2):
        with pytest.raises(requests.ConnectionError):
            rest.session.put(url("cut/b"), data=payload)
        with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            rest.session.get(url("cut/a"))
        assert rest.session.get(url("cut/b")).status_code == 404
        assert rest.session.get(url("cut/a")).content == payload


def test_a_truncated_answer_is_well_formed_and_its_checksum_is_not_its_own(rest: Rest) -> None:
    rest.session.put(url("half/a"), data=b"12345678").raise_for_status()
    with stormy(rest, kind="truncate", match="/half/", requests=1):
        answer = rest.session.get(url("half/a"))
        assert (answer.status_code, answer.content) == (200, b"1234")
        assert rest.session.get(url("half/a")).content == b"12345678"


def test_a_wrong_date_is_the_only_one(rest: Rest) -> None:
    right = rest.session.get(url("nothing")).headers["date"]
    assert abs(parsedate_to_datetime(right).timestamp() - time.time()) < 60
    with stormy(rest, kind="wrong-date", hours=-30):
        wrong = rest.session.get(url("nothing")).headers["date"]
    assert abs(parsedate_to_datetime(wrong).timestamp() + 30 * 3600 - time.time()) < 60


def test_slow_storage_answers_rightly_after_the_delay(rest: Rest) -> None:
    rest.session.put(url("slow/a"), data=b"x").raise_for_status()
    with stormy(rest, kind="slow", delay_seconds=0.5, match="/slow/", requests=1):
        began = time.monotonic()
        assert rest.session.get(url("slow/a")).content == b"x"
        assert time.monotonic() - began >= 0.5
