from __future__ import annotations

import datetime

from penstock_local.orchestrator.inputs import Values
from penstock_local.orchestrator.state import Attempt, TaskSnapshot, TaskState
from penstock_local.services.task_details import task_detail
from penstock_local.tasks.executor import main_job_id

NOON = datetime.datetime(2026, 3, 2, 12, tzinfo=datetime.UTC)


def test_each_attempt_is_a_job_and_the_last_is_the_main_one() -> None:
    snapshot = TaskSnapshot(
        task_id=7,
        parent_task_id=1,
        task_name="t",
        component_name="c",
        state=TaskState.RUNNING,
        create_time=NOON,
        start_time=NOON,
        end_time=None,
        error=None,
        inputs=Values(),
        outputs=Values(),
        attempts=tuple(Attempt(number=number, start_time=NOON) for number in (1, 2, 3)),
    )
    detail = task_detail(snapshot, location_name="projects/1/locations/l")
    container = detail.executor_detail.container_detail
    names = [f"projects/1/locations/l/customJobs/{main_job_id('7', attempt)}" for attempt in (1, 2, 3)]
    assert [*container.failed_main_jobs, container.main_job] == names
