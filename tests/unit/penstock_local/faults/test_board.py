"""The board: which job an order is for, when a fault strikes, how often, and what is told of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock_local.faults.board import FaultBoard
from penstock_local.faults.spec import parse_order
from penstock_local.jobs.processes import ManagedProcess
from penstock_local.storage import ObjectStore


@dataclass
class FakeJob:
    """Takes what a fault does to it and keeps it."""

    done: list[Any] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def running(self, replica: str) -> Mapping[str, ManagedProcess]:
        return {}

    def preempt(self, replica: str, notice_seconds: float) -> bool:
        self.done.append(("preempt", replica, notice_seconds))
        return replica == "workerpool1-0"

    def restart(self, notice_seconds: float, meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self.done.append(("restart", notice_seconds))

    def tell(self, replica: str, line: str) -> None:
        self.log.append(line)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path)
    store.create_bucket("bucket")
    yield store
    store.close()


@pytest.fixture
def board(objects: ObjectStore) -> FaultBoard:
    return FaultBoard(objects)


def armed(board: FaultBoard, *faults: Any) -> Any:
    """What follows the job of these faults, with the job."""
    board.arm(parse_order({"labels": {"run": "one"}, "faults": list(faults)}))
    job, followed = FakeJob(), board.for_job("jobs/1", {"run": "one", "other": "label"})
    followed.begin(job)
    return followed, job


def state(board: FaultBoard, index: int = 0) -> Any:
    return board.to_json()[0]["faults"][index]


def when(board: FaultBoard, wanted: str, index: int = 0) -> Any:
    deadline = time.monotonic() + 10
    while (found := state(board, index))["state"] != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def step_line(step: Any) -> str:
    return json.dumps({"event": "step", "step": step})


def test_a_fault_strikes_once_with_the_first_line_of_its_step_or_a_later_one(board: FaultBoard) -> None:
    followed, job = armed(board, {"do": "preempt", "replica": "workerpool1-0", "at_step": 5})
    for line in (step_line(4), "step 7", '{"step": "7"}', '{"step": true}', '{"step": 9', "[5]"):
        followed.saw(line)
    assert state(board)["state"] == "armed"
    followed.saw(step_line(6))
    told = when(board, "over")
    followed.saw(step_line(5))
    followed.end()
    assert job.done == [("preempt", "workerpool1-0", 0.0)]
    assert (told["step"], told["kind"]) == (6, "preempt")
    assert told["struck_at"] <= told["over_at"]
    assert job.log == ["fault injected: the node of workerpool1-0 is taken away without notice"]


def test_an_order_is_for_the_first_job_with_its_labels(board: FaultBoard) -> None:
    fault = {"do": "restart-job", "at_start": True}
    board.arm(parse_order({"labels": {"run": "one"}, "faults": [fault]}))
    assert board.for_job("jobs/0", {"run": "two"}).faults == []
    assert len(board.for_job("jobs/1", {"run": "one"}).faults) == 1
    assert board.for_job("jobs/2", {"run": "one"}).faults == []
    assert board.to_json()[0]["job"] == "jobs/1"


def test_a_fault_whose_time_never_comes_is_missed(board: FaultBoard) -> None:
    followed, job = armed(
        board, {"do": "restart-job", "at_step": 100}, {"do": "restart-job", "after_seconds": 60}
    )
    followed.end()
    assert [state(board, index)["state"] for index in (0, 1)] == ["missed", "missed"]
    assert job.done == []


def test_after_seconds_counts_from_the_begin_of_the_job(board: FaultBoard) -> None:
    followed, job = armed(board, {"do": "restart-job", "after_seconds": 0.05, "notice_seconds": 3})
    when(board, "over")
    followed.end()
    assert job.done == [("restart", 3.0)]


def test_what_cannot_be_struck_says_why(board: FaultBoard) -> None:
    followed, _ = armed(board, {"do": "preempt", "replica": "workerpool9-0", "at_start": True})
    told = when(board, "failed")
    followed.end()
    assert told["what"] == "could not strike: the job has no running replica workerpool9-0"


def test_a_replica_starts_late_the_first_time_only(board: FaultBoard) -> None:
    followed, job = armed(board, {"do": "delay-start", "replica": "workerpool1-0", "seconds": 7})
    assert followed.delay_of("workerpool0-0") == 0
    assert followed.delay_of("workerpool1-0") == 7
    assert followed.delay_of("workerpool1-0") == 0
    assert job.log == ["fault injected: workerpool1-0 starts 7 s late"]


def test_a_storage_fault_counts_its_requests_and_is_over_with_the_last(board: FaultBoard) -> None:
    followed, _ = armed(
        board, {"do": "storage", "kind": "refuse", "match": "^bucket/kept/", "requests": 2, "at_step": 1}
    )
    assert board.storage_faults("bucket/kept/a", is_write=True) == []
    followed.saw(step_line(1))
    struck = [
        board.storage_faults(target, is_write=False) != []
        for target in ("bucket/kept/a", "bucket/other", "bucket/kept/", "bucket/kept/a")
    ]
    assert struck == [True, False, True, False]
    assert (state(board)["requests"], state(board)["state"]) == (2, "over")


def test_delays_and_dates_leave_the_answer_to_one_other_fault(board: FaultBoard) -> None:
    harms = ({"kind": "wrong-date", "hours": 1}, {"kind": "refuse"}, {"kind": "slow"}, {"kind": "reset"})
    followed, _ = armed(board, *({"do": "storage", "at_start": True, **harm} for harm in harms))
    struck = [fault.harm for fault in board.storage_faults("bucket/a", is_write=True)]
    assert struck == ["wrong-date", "refuse", "slow"]
    assert [state(board, index)["requests"] for index in range(4)] == [1, 1, 1, 0]
    followed.end()


def test_a_storage_fault_ends_with_its_time_and_with_its_job(board: FaultBoard) -> None:
    followed, _ = armed(
        board,
        {"do": "storage", "kind": "slow", "seconds": 0.05, "at_start": True},
        {"do": "storage", "kind": "read-only", "at_start": True},
    )
    assert board.storage_faults("bucket/a", is_write=False) != []
    time.sleep(0.06)
    assert board.storage_faults("bucket/a", is_write=False) == []
    assert board.storage_faults("bucket/a", is_write=True) != []  # the other one
    followed.end()
    assert board.storage_faults("bucket/a", is_write=True) == []


@pytest.mark.parametrize(("how", "left"), [("flip", b"abbd"), ("cut", b"ab")])
def test_damage_changes_the_newest_object_and_no_metadata_that_vouches_for_it(
    board: FaultBoard, objects: ObjectStore, how: str, left: bytes
) -> None:
    for name in ("step-1/a.data", "step-1/manifest", "step-2/x.data"):
        objects.put("bucket", name, b"abcd")
    objects.copy("bucket", _source("step-1/a.data"), "bucket", "elsewhere")
    before = objects.get("bucket", "step-1/a.data")
    followed, job = armed(
        board, {"do": "damage", "how": how, "match": "data$", "beside": "manifest$", "at_start": True}
    )
    told = when(board, "over")
    followed.end()
    after = objects.get("bucket", "step-1/a.data")
    assert objects.read("bucket", "step-1/a.data") == left
    assert (after.generation, after.crc32c) == (before.generation, before.crc32c)
    assert after.size == len(left)
    assert objects.read("bucket", "step-2/x.data") == b"abcd"
    assert objects.read("bucket", "elsewhere") == b"abcd"  # a copy has bytes of its own
    assert "gs://bucket/step-1/a.data; the whole job restarts" in told["what"]
    assert job.done == [("restart", 0.0)]


def test_damage_without_an_object_says_so(board: FaultBoard) -> None:
    followed, _ = armed(board, {"do": "damage", "how": "flip", "match": "data$", "at_start": True})
    assert "no stored object matches 'data$'" in when(board, "failed")["what"]
    followed.end()


def _source(name: str) -> Any:
    from penstock_local.storage.store import Source

    return Source(name=name)
