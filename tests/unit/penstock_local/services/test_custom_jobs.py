"""JobService with real processes, below the wire."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, JobState, job_service

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import InvalidArgumentError, UnavailableError
from penstock_local.faults.board import FaultBoard
from penstock_local.jobs.images import ImageMap, LocalImage
from penstock_local.jobs.processes import ProcessRecord
from penstock_local.logs import LogStore
from penstock_local.services.custom_jobs import FINAL_STATES, MOVES, JobRuntime, JobService, JobValidator
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore
from penstock_local.storage import ObjectStore

PARENT = "projects/demo/locations/us-central1"
SDK = CallContext(user_agent="gl-python/3.11 model-builder/1.165.1")
LAUNCHER = CallContext(user_agent="gl-python/3.11 google-cloud-pipeline-components/2.22.0")
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResourceStore]:
    store = ResourceStore(tmp_path / "db")
    yield store
    store.close()


@pytest.fixture
def make(store: ResourceStore, tmp_path: Path) -> Iterator[Callable[..., JobService]]:
    logs, objects = LogStore(tmp_path / "logs"), ObjectStore(tmp_path / "objects")
    made: list[JobService] = []

    def service(validator: JobValidator | None = None) -> JobService:
        image = LocalImage(repository="python", python=Path(sys.executable), entrypoint=("python", "-c"))
        runtime = JobRuntime(
            images=ImageMap({"python": image}),
            logs=logs,
            record=ProcessRecord(tmp_path / "processes"),
            objects=objects,
            client_environment={"TOLD": "by the client's environment"},
            work_dir=tmp_path / "work",
            faults=FaultBoard(objects),
            validator=validator,
        )
        made.append(JobService(store, Place("demo", 42), runtime))
        return made[-1]

    yield service
    for one in made:
        one.shut_down()
    logs.close()
    objects.close()


def create(service: JobService, *codes: str, accelerators: int = 0, **scheduling: Any) -> CustomJob:
    pools = [
        {
            "replica_count": 1,
            "machine_spec": {"accelerator_count": accelerators},
            "container_spec": {"image_uri": "python:3", "args": [code]},
        }
        for code in codes
    ]
    job = CustomJob(display_name="job", job_spec={"worker_pool_specs": pools, "scheduling": scheduling})
    return service.create_custom_job(job_service.CreateCustomJobRequest(parent=PARENT, custom_job=job), SDK)


def get(service: JobService, job: CustomJob, context: CallContext = SDK) -> CustomJob:
    return service.get_custom_job(job_service.GetCustomJobRequest(name=job.name), context)


def cancel(service: JobService, job: CustomJob) -> None:
    service.cancel_custom_job(job_service.CancelCustomJobRequest(name=job.name), SDK)


def first_line(service: JobService, job: CustomJob, replica: str) -> str:
    job_id, deadline = job.name.rpartition("/")[2], time.monotonic() + 10
    while not (lines := service.runtime.logs.last_lines(job_id=job_id, task_name=replica, count=100)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lines[0]


def test_final_states_have_no_moves_and_every_other_state_reaches_one() -> None:
    assert FINAL_STATES.isdisjoint(MOVES)
    for state, following in MOVES.items():
        assert following & (FINAL_STATES | set(MOVES)), state
        assert JobState.JOB_STATE_PENDING not in following


def test_a_job_is_pending_when_it_is_created_and_ends_succeeded(make: Callable[..., JobService]) -> None:
    service = make()
    created = create(service, "import os; print(os.environ['TOLD'])")
    assert created.state is JobState.JOB_STATE_PENDING
    assert created.name == f"projects/42/locations/us-central1/customJobs/{created.name.rpartition('/')[2]}"
    ended = get(service, created, LAUNCHER)
    assert ended.state is JobState.JOB_STATE_SUCCEEDED
    assert ended.create_time <= ended.start_time <= ended.end_time
    assert first_line(service, created, "workerpool0-0") == "by the client's environment"


def test_googles_launcher_is_held_until_the_job_ends_and_others_are_not(
    make: Callable[..., JobService],
) -> None:
    service = make()
    job = create(service, SLEEP)
    asked = time.monotonic()
    assert get(service, job).state in (JobState.JOB_STATE_PENDING, JobState.JOB_STATE_RUNNING)
    assert time.monotonic() - asked < 1
    canceller = threading.Timer(0.3, cancel, (service, job))
    canceller.start()
    assert get(service, job, LAUNCHER).state is JobState.JOB_STATE_CANCELLED
    assert time.monotonic() - asked >= 0.3
    canceller.join()


def test_a_job_cancelled_at_once_never_runs_to_its_end(make: Callable[..., JobService]) -> None:
    service = make()
    for _ in range(3):
        job = create(service, "import time; time.sleep(0.3)")
        cancel(service, job)
        cancel(service, job)
        assert get(service, job, LAUNCHER).state is JobState.JOB_STATE_CANCELLED
        cancel(service, job)
        assert get(service, job).state is JobState.JOB_STATE_CANCELLED


def test_a_success_after_the_cancel_is_a_cancelled_job(make: Callable[..., JobService]) -> None:
    service = make()
    job = create(
        service,
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('ready', flush=True); time.sleep(60)",
    )
    first_line(service, job, "workerpool0-0")
    cancel(service, job)
    assert get(service, job, LAUNCHER).state is JobState.JOB_STATE_CANCELLED


def test_replicas_have_working_directories_of_their_own(make: Callable[..., JobService]) -> None:
    service = make()
    say = f"import os; print(os.getcwd(), flush=True); {SLEEP}"
    job = create(service, say, say)
    assert first_line(service, job, "workerpool0-0") != first_line(service, job, "workerpool1-0")


@pytest.mark.parametrize(
    ("visible", "accelerators", "primary", "worker"),
    [
        ("4,7,9", 1, ["sees '4'"], "sees '7'"),
        (
            "4",
            1,
            ["the job asks for 2 accelerators and 1 are here; its replicas get none", "sees ''"],
            "sees ''",
        ),
        ("4,7", 0, ["sees ''"], "sees ''"),
    ],
)
def test_replicas_share_no_accelerator(
    make: Callable[..., JobService],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    accelerators: int,
    primary: list[str],
    worker: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    service = make()
    say = "import os; print('sees', repr(os.environ['CUDA_VISIBLE_DEVICES']), flush=True); "
    job = create(service, f"{say}import time; time.sleep(1)", say + SLEEP, accelerators=accelerators)
    assert first_line(service, job, "workerpool1-0") == worker
    get(service, job, LAUNCHER)
    job_id = job.name.rpartition("/")[2]
    assert service.runtime.logs.last_lines(job_id=job_id, task_name="workerpool0-0", count=9) == primary


def test_findings_of_the_validator_refuse_a_job(
    make: Callable[..., JobService], store: ResourceStore
) -> None:
    seen: list[dict[str, Any]] = []

    def validator(job: dict[str, Any]) -> Sequence[str]:
        seen.append(job)
        return ["pool 0 is odd", "pool 1 too"]

    with pytest.raises(InvalidArgumentError, match="pool 0 is odd\npool 1 too"):
        create(make(validator), "pass")
    assert seen[0]["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"] == "python:3"
    assert list(store.all(CustomJob)) == []


def test_shutting_down_cancels_what_runs_and_takes_nothing_new(make: Callable[..., JobService]) -> None:
    service = make()
    jobs = [create(service, SLEEP), create(service, SLEEP)]
    service.shut_down()
    assert [get(service, job).state for job in jobs] == [JobState.JOB_STATE_CANCELLED] * 2
    with pytest.raises(UnavailableError, match="shutting down"):
        create(service, SLEEP)


def test_jobs_that_an_earlier_stand_in_left_are_closed_as_failed(
    make: Callable[..., JobService], store: ResourceStore
) -> None:
    name = "projects/42/locations/us-central1/customJobs/1"
    store.insert(CustomJob(name=name, state=JobState.JOB_STATE_RUNNING), parent="p")
    store.insert(CustomJob(name=f"{name}0", state=JobState.JOB_STATE_SUCCEEDED), parent="p")
    make().fail_interrupted()
    assert store.get(CustomJob, name).state is JobState.JOB_STATE_FAILED
    assert "ended while this job was running" in store.get(CustomJob, name).error.message
    assert store.get(CustomJob, f"{name}0").state is JobState.JOB_STATE_SUCCEEDED
