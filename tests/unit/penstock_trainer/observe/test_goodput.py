"""The log of one attempt: what counts as what, the thread that writes it, and storage that does not take it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.goodput import AttemptRecord, join_attempts, record_uri
from penstock_trainer.observe.goodput import (
    GoodputLog,
    process_age_seconds,
    read_records,
    steady_clock,
)
from penstock_trainer.storage import FileStorage, ObjectInfo, StorageUnavailableError

OWNER = Owner(attempt="a1", fencing_token=1)


class Clock:
    """Moves when it is told to."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at

    def pass_(self, seconds: float) -> None:
        self.at += seconds


def log_of(
    clock: Clock, root_uri: str = "file:///nowhere", *, writes: bool = False, **more: Any
) -> GoodputLog:
    """Of a process that started 5 s before the clock's time."""
    return GoodputLog(
        root_uri,
        more.pop("owner", OWNER),
        world_size=2,
        num_nodes=1,
        save_interval=5,
        writes=writes,
        now=clock,
        started_at=clock() - 5.0,
        **more,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    """A minute is far more than any write of the thread takes, with its second between two."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.01)


def train(log: GoodputLog, clock: Clock, steps: range, *, save_every: int = 5) -> None:
    """Steps of 2 s; saves stall 1 s and are committed 3 s later."""
    with log.span("compute"):
        for step in steps:
            clock.pass_(2.0)
            log.step_done(step)
            if step % save_every == 0:
                with log.saving(step):
                    clock.pass_(1.0)
                clock.pass_(3.0)
                log.committed(step)


def test_every_second_is_in_one_category() -> None:
    clock = Clock()
    log = log_of(clock)
    clock.pass_(2.0)
    with log.span("restore"):
        clock.pass_(4.0)
    log.restored(0)
    clock.pass_(1.0)
    train(log, clock, range(1, 11))
    with log.span("export"):
        clock.pass_(7.0)
    clock.pass_(0.5)
    record = log.record()
    seconds = record.seconds
    assert (seconds.startup, seconds.restore, seconds.export, seconds.other) == (8.0, 4.0, 7.0, 0.5)
    assert (seconds.compute, seconds.blocked_by_saving) == (10 * 2.0 + 2 * 3.0, 2.0)
    assert seconds.total == record.updated_at - record.started_at
    assert record.first_step_at == 1007.0


def test_a_span_within_another_takes_its_time_from_it() -> None:
    clock = Clock()
    log = log_of(clock)
    with log.span("compute"):
        clock.pass_(1.0)
        with log.span("evaluation"):
            clock.pass_(2.0)
            with log.span("blocked_by_saving"):
                clock.pass_(4.0)
            clock.pass_(8.0)
        clock.pass_(16.0)
    seconds = log.record().seconds
    assert (seconds.compute, seconds.evaluation, seconds.blocked_by_saving) == (17.0, 10.0, 4.0)


def test_a_span_that_raises_ends_there() -> None:
    clock = Clock()
    log = log_of(clock)

    def restore() -> None:
        with log.span("restore"):
            clock.pass_(1.0)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        restore()
    clock.pass_(2.0)
    seconds = log.record().seconds
    assert (seconds.restore, seconds.startup) == (1.0, 7.0)


def test_an_open_span_is_in_the_record() -> None:
    clock = Clock()
    log = log_of(clock)
    with log.span("restore"):
        clock.pass_(3.0)
        assert log.record().seconds.restore == 3.0


def test_the_cost_of_a_save_is_its_stall_and_not_the_wait_for_another() -> None:
    clock = Clock()
    log = log_of(clock)
    log.restored(0)
    train(log, clock, range(1, 6))
    with log.span("blocked_by_saving"):
        clock.pass_(100.0)
    record = log.record()
    assert record.seconds.blocked_by_saving == 101.0
    assert (record.saves.mean_stall_seconds, record.saves.mean_write_seconds) == (1.0, 4.0)
    assert record.committed_step == 5


def test_a_commit_that_is_told_late_took_as_long_as_is_said() -> None:
    clock = Clock()
    log = log_of(clock)
    with log.saving(5):
        clock.pass_(1.0)
    clock.pass_(60.0)
    log.committed(5, 3.5)
    assert log.record().saves.mean_write_seconds == 3.5


def test_an_attempt_that_is_killed_early_is_known_to_a_part_of_its_age(tmp_path: Path) -> None:
    clock, storage = Clock(), FileStorage()
    log = log_of(clock, tmp_path.as_uri(), writes=True, storage=storage)
    clock.pass_(5.0)  # 10 s old: the next is due after a second, not after the interval of half a minute
    wait_for(lambda: bool(read_records(tmp_path.as_uri(), storage)))
    log.restored(3)
    began = time.monotonic()
    wait_for(lambda: read_records(tmp_path.as_uri(), storage)[0].resumed_from == 3)
    assert time.monotonic() - began < 15
    log.close("failed")


def test_a_save_that_failed_is_none_and_a_commit_that_nobody_began_neither() -> None:
    clock = Clock()
    log = log_of(clock)
    with pytest.raises(OSError, match="full"), log.saving(5):
        raise OSError("full")
    log.committed(7)
    record = log.record()
    assert (record.saves.taken, record.saves.committed, record.committed_step, record.marks) == (
        0,
        0,
        None,
        (),
    )


def test_lost_work_is_known_from_the_record_of_a_kill() -> None:
    clock = Clock()
    first = log_of(clock)
    first.restored(0)
    train(first, clock, range(1, 9))
    killed = first.record()
    clock.pass_(20.0)
    second = log_of(clock, owner=Owner(attempt="a2", fencing_token=2))
    second.restored(5)
    train(second, clock, range(6, 11))
    second.close("done")
    goodput = join_attempts([killed, second.record()], is_over=True)
    # Steps 6 to 8 and the 3 s beside them in which the save of step 5 was written.
    assert goodput.lost_work == 3 * 2.0 + 3.0
    assert goodput.idle == 15.0  # the second process started 5 s before its log


def test_a_roll_back_moves_the_steps_since_to_lost_work() -> None:
    clock = Clock()
    log = log_of(clock)
    log.restored(0)
    train(log, clock, range(1, 9), save_every=4)
    with log.span("restore"):
        clock.pass_(1.0)
    log.rolled_back(4)
    after = log.record()
    assert (after.last_step, after.resumed_from, after.seconds.compute) == (4, 0, 8.0)
    assert after.seconds.rolled_back == 4 * 2.0 + 3.0 + 3.0
    assert [mark.step for mark in after.marks] == [4]
    train(log, clock, range(5, 9), save_every=4)
    assert log.record().compute_until(8) == 8.0 + 4 * 2.0 + 3.0
    assert log.record().seconds.total == log.record().updated_at - log.record().started_at


def test_a_roll_back_behind_its_own_beginning_is_where_it_resumed_from() -> None:
    clock = Clock()
    log = log_of(clock)
    log.restored(10)
    train(log, clock, range(11, 14))
    log.rolled_back(5)
    record = log.record()
    assert (record.resumed_from, record.seconds.compute, record.seconds.rolled_back) == (5, 0.0, 6.0)


def test_a_long_run_keeps_a_short_record() -> None:
    clock = Clock()
    log = log_of(clock)
    log.restored(0)
    train(log, clock, range(1, 2001), save_every=1)
    marks = log.record().marks
    assert len(marks) <= 128
    assert [mark.step for mark in marks[-64:]] == list(range(1937, 2001))
    # Marks that were left out are found between their neighbours: two steps with the 3 s after their saves, and one.
    assert 3 not in [mark.step for mark in marks]
    assert log.record().compute_until(3) == pytest.approx(2 * 5.0 + 2.0)


def test_the_thread_writes_at_once_after_a_commit_and_at_the_end(tmp_path: Path) -> None:
    clock, storage = Clock(), FileStorage()
    root_uri = tmp_path.as_uri()
    log = log_of(clock, root_uri, writes=True, storage=storage, interval_seconds=3600.0)

    def written() -> AttemptRecord:
        return AttemptRecord.from_json(storage.read(record_uri(root_uri, "a1")))

    wait_for(lambda: storage.stat(record_uri(root_uri, "a1")) is not None)
    assert written().last_step is None
    log.restored(0)
    train(log, clock, range(1, 6))
    wait_for(lambda: written().committed_step == 5)
    assert written().outcome is None
    clock.pass_(1.0)
    log.close("preempted")
    assert (written().outcome, written().ended_at) == ("preempted", clock())
    clock.pass_(50.0)
    log.close("done")
    assert written() == log.record()
    assert written().outcome == "preempted"


def test_the_thread_writes_from_time_to_time(tmp_path: Path) -> None:
    clock, storage = Clock(), FileStorage()
    log = log_of(clock, tmp_path.as_uri(), writes=True, storage=storage, interval_seconds=0.0)
    wait_for(lambda: bool(read_records(tmp_path.as_uri(), storage)))
    log.restored(3)
    wait_for(lambda: read_records(tmp_path.as_uri(), storage)[0].resumed_from == 3)
    log.close("failed")


def test_at_the_end_of_a_run_the_log_tells_of_all_its_attempts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    first = log_of(clock, tmp_path.as_uri(), writes=True)
    first.restored(0)
    train(first, clock, range(1, 9))
    first.close("retryable")
    clock.pass_(20.0)
    second = log_of(clock, tmp_path.as_uri(), writes=True, owner=Owner(attempt="a2", fencing_token=2))
    second.restored(5)
    train(second, clock, range(6, 11))
    with caplog.at_level(logging.INFO):
        second.close("done")
    told, interval = caplog.messages
    assert told.startswith("goodput ")
    assert "in 2 attempts" in told
    assert "lost work 9 s, idle 15 s" in told
    assert "interruptions: 1, MTBF of the job" in told
    assert interval.startswith("checkpoint interval: save every ")


class Failing(FileStorage):
    """Takes no object."""

    def __init__(self) -> None:
        self.tries = 0

    def write(self, uri: str, data: Any, **_: Any) -> ObjectInfo:
        self.tries += 1
        raise StorageUnavailableError(f"{uri}: the service does not answer")


def test_storage_that_fails_is_named_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, storage = Clock(), Failing()
    with caplog.at_level(logging.INFO):
        log = log_of(clock, tmp_path.as_uri(), writes=True, storage=storage, interval_seconds=0.0)
        log.restored(0)
        train(log, clock, range(1, 11))
        wait_for(lambda: storage.tries > 1)
        log.close("done")
    warnings = [entry.message for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "a1.json: the service does not answer" in warnings[0]
    assert any(message.startswith("goodput ") for message in caplog.messages)  # of this attempt alone


class Hanging(FileStorage):
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def write(self, uri: str, data: Any, **more: Any) -> ObjectInfo:
        self.asked.set()
        assert self.go.wait(60)
        return super().write(uri, data, **more)


def test_storage_that_hangs_keeps_neither_training_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, storage, before = Clock(), Hanging(), set(threading.enumerate())
    log = log_of(clock, tmp_path.as_uri(), writes=True, storage=storage)
    assert storage.asked.wait(60)
    train(log, clock, range(1, 11))  # would hang here
    log.close("done", timeout_seconds=0.05)
    assert "was not written within 0.05 s" in caplog.text
    storage.go.set()
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_rank_that_does_not_write_starts_no_thread(tmp_path: Path) -> None:
    log = log_of(Clock(), tmp_path.as_uri())
    log.close("done")
    assert list(tmp_path.iterdir()) == []


def test_a_process_knows_when_it_was_started() -> None:
    program = (
        "import time; time.sleep(0.5)\n"
        "from penstock_trainer.observe.goodput import process_age_seconds, steady_clock\n"
        "print(steady_clock()() - process_age_seconds())"
    )
    before = time.time()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # The kernel counts in ticks of 10 ms; starting a process on a busy machine takes longer than it is counted.
    assert before - 0.02 <= float(done.stdout) < time.time() - 0.5
    assert process_age_seconds() > 0
    assert steady_clock()() == pytest.approx(time.time(), abs=1.0)


_KILLED = """
import sys, time
from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.observe.goodput import GoodputLog

root_uri, token, resumed_from, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
owner = Owner(attempt=f"a{token}", fencing_token=token)
log = GoodputLog(root_uri, owner, world_size=1, num_nodes=1, save_interval=4)
log.restored(resumed_from)
with log.span("compute"):
    for step in range(resumed_from + 1, steps + 1):
        time.sleep(0.05)
        log.step_done(step)
        if step % 4 == 0:
            with log.saving(step):
                time.sleep(0.01)
            log.committed(step)
        print(step, flush=True)
log.close("done")
"""


def test_a_killed_process_is_known_by_its_record(tmp_path: Path) -> None:
    def start(token: int, resumed_from: int, steps: int) -> subprocess.Popen[str]:
        arguments = [tmp_path.as_uri(), str(token), str(resumed_from), str(steps)]
        return subprocess.Popen(
            [sys.executable, "-c", _KILLED, *arguments], stdout=subprocess.PIPE, text=True
        )

    storage = FileStorage()
    with start(1, 0, 10_000) as first:
        wait_for(
            lambda: any((each.committed_step or 0) >= 8 for each in read_records(tmp_path.as_uri(), storage))
        )
        os.kill(first.pid, signal.SIGKILL)
    time.sleep(0.2)
    with start(2, 4, 12) as second:
        second.communicate()
    assert second.returncode == 0
    goodput = join_attempts(read_records(tmp_path.as_uri(), storage), is_over=True)
    assert (goodput.attempts, goodput.interruptions) == (2, 1)
    # 8 steps of at least 50 ms are in the model from the second, 4 from the first, whose others were done again.
    assert goodput.compute >= 12 * 0.05
    assert goodput.lost_work >= 4 * 0.05
    assert goodput.startup > 0
    assert goodput.idle > 0.15  # of 0.2 s, less the kernel's tick of 10 ms in which the second was started


def test_a_step_costs_next_to_nothing() -> None:
    log = log_of(Clock())
    began = time.thread_time()
    for step in range(100_000):
        log.step_done(step)
    # Measured: 0.05 microseconds; 5 are allowed for a busy machine, and are nothing beside any step.
    assert (time.thread_time() - began) / 100_000 < 5e-6
