from __future__ import annotations

import datetime
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import PipelineJob, Schedule, pipeline_service, schedule_service

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    ApiError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore
from penstock_local.services.schedules import ScheduleService

PARENT = "projects/demo/locations/us-central1"
CALL = CallContext(user_agent="")
NOON = datetime.datetime(2026, 3, 2, 12, 0, 30, tzinfo=datetime.UTC)  # a Monday
MINUTE = datetime.timedelta(minutes=1)


class Pipelines:
    """The schedule's side of the pipeline service: notes what is created, and says what runs."""

    def __init__(self) -> None:
        self.created: list[PipelineJob] = []
        self.times: list[str] = []
        self.running = 0
        self.error: Exception | None = None

    def create_scheduled_job(
        self,
        request: pipeline_service.CreatePipelineJobRequest,
        *,
        schedule_name: str,
        schedule_time: datetime.datetime,
    ) -> PipelineJob:
        if self.error:
            raise self.error
        self.times.append(f"{schedule_time:%H:%M:%S}")
        job = PipelineJob(request.pipeline_job)
        job.schedule_name = schedule_name
        job.name = f"{request.parent}/pipelineJobs/{len(self.created)}"
        self.created.append(job)
        return job

    def running_of_schedule(self, schedule_name: str) -> int:
        return self.running


class Bench:
    """A service whose clock stands still until it is moved."""

    def __init__(self, store: ResourceStore) -> None:
        self.time = NOON
        self.pipelines = Pipelines()
        self.service = ScheduleService(store, Place("demo", 42), self.pipelines, clock=lambda: self.time)

    def create(self, **fields: Any) -> Schedule:
        wanted = {
            "display_name": "weekly",
            "cron": "* * * * *",
            "max_concurrent_run_count": 1,
            "create_pipeline_job_request": {"parent": PARENT, "pipeline_job": {"labels": {"a": "b"}}},
            **fields,
        }
        request = schedule_service.CreateScheduleRequest(parent=PARENT, schedule=Schedule(wanted))
        return self.service.create_schedule(request, CALL)

    def get(self, schedule: Schedule) -> Schedule:
        return self.service.get_schedule(schedule_service.GetScheduleRequest(name=schedule.name), CALL)

    def pass_minutes(self, count: int) -> None:
        for _ in range(count):
            self.time += MINUTE
            self.service.fire_due()

    def pause(self, schedule: Schedule) -> None:
        self.service.pause_schedule(schedule_service.PauseScheduleRequest(name=schedule.name), CALL)

    def resume(self, schedule: Schedule, *, catch_up: bool = False) -> None:
        request = schedule_service.ResumeScheduleRequest(name=schedule.name, catch_up=catch_up)
        self.service.resume_schedule(request, CALL)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    store = ResourceStore(tmp_path / "db")
    yield Bench(store)
    store.close()


@pytest.mark.parametrize(
    ("cron", "next_run"),
    [
        ("* * * * *", "2026-03-02T12:01:00+00:00"),
        ("0 3 * * 1", "2026-03-09T03:00:00+00:00"),
        ("TZ=Europe/Berlin 0 3 * * *", "2026-03-03T02:00:00+00:00"),
        ("CRON_TZ=America/New_York 30 9 * * *", "2026-03-02T14:30:00+00:00"),
        ("TZ=Europe/Berlin 0 12 30 3 *", "2026-03-30T10:00:00+00:00"),  # summer time by then
    ],
)
def test_the_first_run_is_the_next_time_that_the_cron_expression_names(
    bench: Bench, cron: str, next_run: str
) -> None:
    schedule = bench.create(cron=cron)
    assert schedule.next_run_time.isoformat() == next_run
    assert schedule.state is Schedule.State.ACTIVE


def test_nothing_is_run_before_the_start_time(bench: Bench) -> None:
    schedule = bench.create(start_time=NOON + 10 * MINUTE)
    assert schedule.next_run_time.isoformat() == "2026-03-02T12:11:00+00:00"


def test_each_time_that_comes_creates_one_job_with_what_was_asked(bench: Bench) -> None:
    schedule = bench.create()
    bench.service.fire_due()
    assert bench.pipelines.created == []
    bench.pass_minutes(2)
    bench.service.fire_due()
    assert bench.pipelines.times == ["12:01:00", "12:02:00"], "when they were due, not when they were created"
    job = bench.pipelines.created[0]
    assert (job.schedule_name, job.display_name, dict(job.labels)) == (schedule.name, "weekly", {"a": "b"})
    kept = bench.get(schedule)
    assert kept.started_run_count == 2
    assert kept.last_scheduled_run_response.run_response.startswith("OK")
    assert kept.last_scheduled_run_response.scheduled_run_time.isoformat() == "2026-03-02T12:02:00+00:00"


def test_a_schedule_is_completed_after_its_last_run(bench: Bench) -> None:
    schedule = bench.create(max_run_count=2)
    bench.pass_minutes(5)
    assert len(bench.pipelines.created) == 2
    assert bench.get(schedule).state is Schedule.State.COMPLETED


def test_a_schedule_is_completed_when_its_end_has_come(bench: Bench) -> None:
    schedule = bench.create(end_time=NOON + 2 * MINUTE)
    bench.pass_minutes(5)
    assert len(bench.pipelines.created) == 2
    assert bench.get(schedule).state is Schedule.State.COMPLETED
    assert bench.create(cron="0 3 * * *", end_time=NOON + MINUTE).state is Schedule.State.COMPLETED


def test_a_run_that_finds_too_many_running_is_skipped(bench: Bench) -> None:
    schedule = bench.create()
    bench.pipelines.running = 1
    bench.pass_minutes(2)
    kept = bench.get(schedule)
    assert kept.last_scheduled_run_response.run_response == "SKIPPED"
    assert kept.started_run_count == 0
    bench.pipelines.running = 0
    bench.pass_minutes(1)
    assert len(bench.pipelines.created) == 1


def test_with_queueing_the_run_waits_for_another_ones_end(bench: Bench) -> None:
    schedule = bench.create(allow_queueing=True)
    bench.pipelines.running = 1
    bench.pass_minutes(1)
    assert bench.pipelines.created == []
    assert 0 < bench.service._seconds_to_next() <= 1, "it looks again soon, and not all the time"
    bench.pipelines.running = 0
    bench.service.fire_due()
    assert len(bench.pipelines.created) == 1
    assert (
        bench.get(schedule).last_scheduled_run_response.scheduled_run_time.isoformat()
        == "2026-03-02T12:01:00+00:00"
    )


@pytest.mark.parametrize(("catch_up", "runs"), [(False, 1), (True, 4)])
def test_resuming_makes_up_for_missed_runs_only_when_asked(bench: Bench, catch_up: bool, runs: int) -> None:
    schedule = bench.create()
    bench.pause(schedule)
    bench.pass_minutes(3)
    assert bench.pipelines.created == []
    bench.resume(schedule, catch_up=catch_up)
    for _ in range(5):
        bench.service.fire_due()
    bench.pass_minutes(1)
    assert len(bench.pipelines.created) == runs
    assert bench.get(schedule).catch_up is catch_up


@pytest.mark.parametrize(("catch_up", "times"), [(False, []), (True, ["12:01:00", "12:02:00", "12:03:00"])])
def test_what_came_due_while_no_stand_in_ran_is_made_up_for_only_when_asked(
    bench: Bench, catch_up: bool, times: list[str]
) -> None:
    schedule = bench.create()
    bench.pause(schedule)
    bench.resume(schedule, catch_up=catch_up)
    bench.time += 3 * MINUTE
    bench.service.start()
    bench.service.shut_down()
    for _ in range(5):
        bench.service.fire_due()
    assert bench.pipelines.times == times
    bench.pass_minutes(1)
    assert bench.pipelines.times == [*times, "12:04:00"]


def test_a_failure_inside_the_stand_in_is_told_with_its_traceback_and_the_schedule_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = bench.create()
    bench.pipelines.error = RuntimeError("the disk is full")
    bench.pass_minutes(1)
    assert "RuntimeError: the disk is full" in caplog.text
    assert "the disk is full" in bench.get(schedule).last_scheduled_run_response.run_response
    bench.pipelines.error = None
    bench.pass_minutes(1)
    assert bench.pipelines.times == ["12:02:00"]


def test_the_thread_survives_whatever_goes_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(start_time=NOON)
    real, failures = bench.pipelines.running_of_schedule, [sqlite3.OperationalError("locked")]

    def running_of_schedule(name: str) -> int:
        if failures:
            raise failures.pop()
        return real(name)

    monkeypatch.setattr(bench.pipelines, "running_of_schedule", running_of_schedule)
    bench.service.start()
    bench.time += MINUTE
    bench.service._notify()
    deadline = time.monotonic() + 5
    while not bench.pipelines.created:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.service.shut_down()
    assert "OperationalError: locked" in caplog.text


def test_pause_and_resume_are_for_the_other_state_alone(bench: Bench) -> None:
    schedule = bench.create()
    with pytest.raises(FailedPreconditionError, match="is ACTIVE; it must be PAUSED"):
        bench.resume(schedule)
    bench.pause(schedule)
    with pytest.raises(FailedPreconditionError, match="is PAUSED; it must be ACTIVE"):
        bench.pause(schedule)


def test_a_run_that_cannot_be_created_is_told_and_the_schedule_goes_on(bench: Bench) -> None:
    schedule = bench.create()
    bench.pipelines.error = InvalidArgumentError("the image is unknown")
    bench.pass_minutes(1)
    assert bench.get(schedule).last_scheduled_run_response.run_response == "the image is unknown"
    bench.pipelines.error = None
    bench.pass_minutes(1)
    assert len(bench.pipelines.created) == 1


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("", "Wrong number of fields"),
        ("* * * *", "Wrong number of fields"),
        ("* * * * * *", "Wrong number of fields"),
        ("@daily", "Wrong number of fields"),
        ("61 * * * *", "Bad minute"),
        ("TZ=Mars/Olympus 0 3 * * *", "Mars/Olympus"),
        ("TZ=../x 0 3 * * *", "subdirectories"),
    ],
)
def test_a_bad_cron_expression_is_told_with_its_reason_and_a_good_one(
    bench: Bench, cron: str, reason: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        bench.create(cron=cron)
    message = str(caught.value)
    assert message.startswith(f"schedule.cron {cron!r} is not valid")
    assert reason in message
    assert "`0 3 * * 1`" in message


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"display_name": ""}, InvalidArgumentError, "schedule.displayName"),
        ({"max_concurrent_run_count": 0}, InvalidArgumentError, "schedule.maxConcurrentRunCount"),
        ({"create_pipeline_job_request": {"pipeline_job_id": "x"}}, InvalidArgumentError, "pipelineJobId"),
        (
            {
                "create_pipeline_job_request": None,
                "create_notebook_execution_job_request": {"parent": PARENT},
            },
            UnimplementedError,
            "schedule.createNotebookExecutionJobRequest",
        ),
        ({"max_concurrent_active_run_count": 2}, UnimplementedError, "schedule.maxConcurrentActiveRunCount"),
        (
            {"create_pipeline_job_request": {"parent": PARENT, "pipeline_job": {"network": "x"}}},
            UnimplementedError,
            "schedule.createPipelineJobRequest.pipelineJob.network",
        ),
        ({"create_pipeline_job_request": None}, InvalidArgumentError, "schedule.createPipelineJobRequest"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(
    bench: Bench, fields: dict[str, Any], error: type[ApiError], told: str
) -> None:
    with pytest.raises(error, match=told):
        bench.create(**fields)


def test_the_thread_fires_what_comes_due_and_survives_a_delete(bench: Bench) -> None:
    bench.create()
    deleted = bench.create()
    bench.service.start()
    bench.service.delete_schedule(schedule_service.DeleteScheduleRequest(name=deleted.name), CALL)
    bench.time += MINUTE
    bench.create(start_time=NOON + 100 * MINUTE)  # wakes the thread
    deadline = time.monotonic() + 5
    while not bench.pipelines.created:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.service.shut_down()
    assert len(bench.pipelines.created) == 1
