"""google.cloud.aiplatform.v1.ScheduleService: cron schedules that create pipeline jobs."""

from __future__ import annotations

import datetime
import logging
import re
import threading
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cronsim import CronSim, CronSimError
from google.cloud.aiplatform_v1.types import PipelineJob, Schedule, pipeline_service, schedule_service
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    ApiError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from penstock_local.services.custom_jobs import done_operation
from penstock_local.services.fields import (
    OUTPUT_ONLY,
    SCHEDULE_FIELDS,
    SCHEDULE_OUTPUT_ONLY,
    drop_output_only,
    refuse_unknown_fields,
)
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore, list_page, now

logger = logging.getLogger(__name__)

_CRON_FIELDS = 5
_TIME_ZONE = re.compile(r"(?:CRON_)?TZ=(\S+)\s+(.*)$")
_LONGEST_SLEEP_SECONDS = 60.0
_QUEUE_POLL_SECONDS = 1.0


class PipelineJobs(Protocol):
    """What a schedule needs of the pipeline service."""

    def create_scheduled_job(
        self,
        request: pipeline_service.CreatePipelineJobRequest,
        *,
        schedule_name: str,
        schedule_time: datetime.datetime,
    ) -> PipelineJob:
        """Create and start the job that a schedule wanted to start at `schedule_time`."""

    def running_of_schedule(self, schedule_name: str) -> int:
        """How many jobs of a schedule have not ended."""


@dataclass
class ScheduleService:
    """Schedules of one stand-in, and the thread that fires them."""

    store: ResourceStore
    place: Place
    pipelines: PipelineJobs
    clock: Callable[[], datetime.datetime] = now
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def create_schedule(self, request: schedule_service.CreateScheduleRequest, _: CallContext) -> Schedule:
        """Check the schedule and set its first run."""
        parent = self.place.parent(request.parent)
        schedule = Schedule(request.schedule)
        drop_output_only(schedule, SCHEDULE_OUTPUT_ONLY)
        if "create_pipeline_job_request" in schedule:
            drop_output_only(schedule.create_pipeline_job_request.pipeline_job, OUTPUT_ONLY)
        self._check(schedule)
        schedule.name = f"{parent}/schedules/{self.store.next_id()}"
        schedule.state = Schedule.State.ACTIVE
        schedule.create_time = schedule.update_time = self.clock()
        schedule.start_time = schedule.start_time or schedule.create_time
        _advance(schedule, max(self.clock(), schedule.start_time))
        self.store.insert(schedule, parent=parent)
        self._notify()
        return schedule

    def get_schedule(self, request: schedule_service.GetScheduleRequest, _: CallContext) -> Schedule:
        """The schedule as it is."""
        return self.store.get(Schedule, self.place.name(request.name))

    def list_schedules(self, request: schedule_service.ListSchedulesRequest, _: CallContext) -> Any:
        """Schedules of a location."""
        page, token = list_page(list(self.store.all(Schedule, self.place.parent(request.parent))), request)
        return schedule_service.ListSchedulesResponse(schedules=page, next_page_token=token)

    def pause_schedule(
        self, request: schedule_service.PauseScheduleRequest, _: CallContext
    ) -> empty_pb2.Empty:
        """Stop firing until resumed."""
        self._set_state(request.name, Schedule.State.ACTIVE, Schedule.State.PAUSED)
        return empty_pb2.Empty()

    def resume_schedule(
        self, request: schedule_service.ResumeScheduleRequest, _: CallContext
    ) -> empty_pb2.Empty:
        """Fire again; with `catch_up`, the runs missed while paused are made up for."""
        schedule = self._set_state(request.name, Schedule.State.PAUSED, Schedule.State.ACTIVE)

        def change(message: Schedule) -> None:
            message.catch_up = request.catch_up
            if not request.catch_up:
                _advance(message, self.clock())

        self.store.update(Schedule, schedule.name, change)
        self._notify()
        return empty_pb2.Empty()

    def delete_schedule(
        self, request: schedule_service.DeleteScheduleRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Forget the schedule; its jobs stay."""
        name = self.place.name(request.name)
        self.store.delete(Schedule, name)
        return done_operation(name, empty_pb2.Empty())

    def start(self) -> None:
        """Begin to fire.

        What came due while no stand-in ran is missed, unless the schedule was resumed with `catch_up`. That is our
        choice: Vertex documents catching up for paused schedules only, and its service has no such pause.
        """
        for schedule in self.store.all(Schedule):
            is_overdue = schedule.state == Schedule.State.ACTIVE and schedule.next_run_time <= self.clock()
            if is_overdue and not schedule.catch_up:
                self.store.update(Schedule, schedule.name, lambda message: _advance(message, self.clock()))
        self._thread = threading.Thread(target=self._loop, name="schedules", daemon=True)
        self._thread.start()

    def shut_down(self) -> None:
        """Fire nothing more."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def fire_due(self) -> None:
        """Create the jobs of every schedule whose time has come."""
        for schedule in self.store.all(Schedule):
            if schedule.state == Schedule.State.ACTIVE and self.clock() >= schedule.next_run_time:
                try:
                    self._fire(schedule)
                except NotFoundError as exc:
                    logger.info("a schedule was deleted while it was due: %s", exc)
                except Exception:
                    logger.exception("%s could not be fired; it is tried again", schedule.name)

    def _loop(self) -> None:
        while True:
            try:
                self.fire_due()
            except Exception:
                logger.exception("the schedules cannot be read; it is tried again")
            with self._wake:
                if not self._stopped:
                    self._wake.wait(self._seconds_to_look())
                if self._stopped:
                    return

    def _seconds_to_look(self) -> float:
        try:
            return self._seconds_to_next()
        except Exception:
            logger.exception("the next run of a schedule cannot be told; it is looked for again")
            return _LONGEST_SLEEP_SECONDS

    def _seconds_to_next(self) -> float:
        active = [s.next_run_time for s in self.store.all(Schedule) if s.state == Schedule.State.ACTIVE]
        waits: list[float] = [(time - self.clock()).total_seconds() for time in active]
        # What is due and was not fired waits in the queue for another run's end.
        return min([_LONGEST_SLEEP_SECONDS, *(wait if wait > 0 else _QUEUE_POLL_SECONDS for wait in waits)])

    def _fire(self, schedule: Schedule) -> None:
        due = schedule.next_run_time
        busy = self.pipelines.running_of_schedule(schedule.name) >= schedule.max_concurrent_run_count
        if busy and schedule.allow_queueing:
            return  # the run stays due until another one has ended
        response = Schedule.RunResponse(scheduled_run_time=due, run_response="SKIPPED" if busy else "OK")
        if not busy:
            response.run_response = self._create_job(schedule, due)

        def change(message: Schedule) -> None:
            message.started_run_count += not busy
            message.last_scheduled_run_response = response
            _advance(message, due)
            message.update_time = self.clock()

        self.store.update(Schedule, schedule.name, change)

    def _create_job(self, schedule: Schedule, due: datetime.datetime) -> str:
        request = pipeline_service.CreatePipelineJobRequest(schedule.create_pipeline_job_request)
        request.pipeline_job.display_name = request.pipeline_job.display_name or schedule.display_name
        try:
            job = self.pipelines.create_scheduled_job(request, schedule_name=schedule.name, schedule_time=due)
        except ApiError as exc:
            logger.warning("%s could not create the run of %s: %s", schedule.name, due, exc)
            return str(exc)
        except Exception as exc:
            logger.exception("%s: the run of %s failed inside the stand-in", schedule.name, due)
            return f"the stand-in failed: {exc!r}"
        return f"OK: {job.name}"

    def _check(self, schedule: Schedule) -> None:
        if not schedule.display_name:
            raise InvalidArgumentError("schedule.displayName is empty; give the schedule a name.")
        if schedule.max_concurrent_run_count < 1:
            raise InvalidArgumentError("schedule.maxConcurrentRunCount is required and at least 1.")
        if schedule.create_pipeline_job_request.pipeline_job_id:
            raise InvalidArgumentError(
                "schedule.createPipelineJobRequest.pipelineJobId cannot be set: each run has its own."
            )
        refuse_unknown_fields(schedule, "schedule", SCHEDULE_FIELDS)
        if "create_pipeline_job_request" not in schedule:
            raise InvalidArgumentError("schedule.createPipelineJobRequest is missing: say what to run.")

    def _set_state(self, given: str, allowed: Schedule.State, state: Schedule.State) -> Schedule:
        name = self.place.name(given)

        def change(schedule: Schedule) -> None:
            if schedule.state != allowed:
                raise FailedPreconditionError(f"{name} is {schedule.state.name}; it must be {allowed.name}.")
            schedule.state, schedule.update_time = state, self.clock()
            if state is Schedule.State.PAUSED:
                schedule.last_pause_time = self.clock()
            else:
                schedule.last_resume_time = self.clock()

        return self.store.update(Schedule, name, change)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()


def _advance(schedule: Schedule, after: datetime.datetime) -> None:
    """Set the first run after `after`, or end the schedule. Raises InvalidArgumentError for a bad cron expression."""
    schedule.next_run_time = _next_run(schedule, after)
    is_past_end = schedule.end_time and schedule.next_run_time > schedule.end_time
    if is_past_end or 0 < schedule.max_run_count <= schedule.started_run_count:
        schedule.state = Schedule.State.COMPLETED


def _next_run(schedule: Schedule, after: datetime.datetime) -> datetime.datetime:
    """The first time after `after` that the cron expression names. Raises InvalidArgumentError."""
    match = _TIME_ZONE.match(schedule.cron)
    zone_name, expression = (match[1], match[2]) if match else ("UTC", schedule.cron)
    try:
        if len(expression.split()) != _CRON_FIELDS:
            raise CronSimError("Wrong number of fields")  # CronSim itself takes a sixth, for seconds
        zone = zoneinfo.ZoneInfo(zone_name)
        return next(CronSim(expression, after.astimezone(zone))).astimezone(datetime.UTC)
    except (CronSimError, StopIteration, zoneinfo.ZoneInfoNotFoundError, ValueError) as exc:
        raise InvalidArgumentError(
            f"schedule.cron {schedule.cron!r} is not valid ({exc!r}); give five fields, such as `0 3 * * 1`, with an "
            "optional prefix `TZ=Europe/Berlin`."
        ) from exc
