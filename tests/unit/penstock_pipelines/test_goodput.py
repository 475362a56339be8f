"""What a person sees of where a run's time went."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from compiled import ROOT
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJobSpec,
    GcsDestination,
    WorkerPoolSpec,
)
from penstock_pipelines.cli import main
from penstock_pipelines.goodput import checkpoint_root_uri, plan_options, print_goodput, read_goodput
from penstock_trainer.contract.config import CheckpointConfig, JobConfig
from penstock_trainer.contract.goodput import AttemptRecord, AttemptSeconds, Mark, SaveTimes, record_uri
from penstock_trainer.storage import FileStorage, Storage, StorageUnavailableError

TRAINER = ("python", "-m", "penstock_trainer")


def job(*args: str, command: tuple[str, ...] = TRAINER, output: str = "gs://b/run/train") -> CustomJobSpec:
    container = ContainerSpec(image_uri="trainer", command=command, args=args)
    return CustomJobSpec(
        worker_pool_specs=(WorkerPoolSpec(container_spec=container, replica_count=1),),
        base_output_directory=GcsDestination(output_uri_prefix=output) if output else None,
    )


def record(token: int, *, started_at: float, resumed_from: int, is_killed: bool) -> AttemptRecord:
    """3600 s: 600 of start-up, 2950 of compute over 295 steps, 5 saves of 10 s."""
    ended_at = started_at + 3600.0
    return AttemptRecord(
        format_version=1,
        attempt=f"a{token}",
        fencing_token=token,
        world_size=16,
        num_nodes=2,
        save_interval=50,
        started_at=started_at,
        updated_at=ended_at,
        first_step_at=started_at + 600.0,
        ended_at=None if is_killed else ended_at,
        outcome=None if is_killed else "done",
        resumed_from=resumed_from,
        last_step=resumed_from + 295,
        committed_step=resumed_from + 250,
        seconds=AttemptSeconds(startup=600.0, compute=2950.0, blocked_by_saving=50.0),
        saves=SaveTimes(taken=5, stall_seconds=50.0, committed=5, write_seconds=100.0),
        marks=tuple(
            Mark(step=resumed_from + step, compute_seconds=10.0 * step) for step in range(50, 251, 50)
        ),
    )


def leave(root: Path, *records: AttemptRecord) -> str:
    for each in records:
        FileStorage().write(record_uri(root.as_uri(), each.attempt), each.to_json().encode())
    return root.as_uri()


def printed(spec: CustomJobSpec, storage: Storage | None = None) -> str:
    output = io.StringIO()
    print_goodput(Console(file=output, width=160), spec, is_over=True, storage=storage)
    return output.getvalue()


def config_arg(root_uri: str) -> str:
    return "--config=" + JobConfig(checkpoint=CheckpointConfig(uri=root_uri)).to_json()


def test_the_records_lie_where_vertex_tells_the_trainer_to_keep_checkpoints() -> None:
    assert checkpoint_root_uri(job("--config={}")) == "gs://b/run/train/checkpoints"


def test_a_checkpoint_root_of_the_config_or_of_a_flag_goes_before() -> None:
    assert checkpoint_root_uri(job(config_arg("gs://other/root"))) == "gs://other/root"
    assert checkpoint_root_uri(job("--config={}", "--checkpoint.uri=gs://third/root")) == "gs://third/root"


@pytest.mark.parametrize(
    "spec",
    [
        CustomJobSpec(),
        job(command=("python", "-m", "somebody.else")),
        job("launch", "--", "python", "train.py"),
        job("--config={}", output=""),
    ],
)
def test_another_program_has_no_goodput(spec: CustomJobSpec) -> None:
    assert checkpoint_root_uri(spec) == ""
    assert printed(spec) == ""


def test_a_run_without_records_has_no_goodput(tmp_path: Path) -> None:
    assert printed(job(config_arg(tmp_path.as_uri()))) == ""


def test_a_person_sees_where_the_time_went_and_how_often_to_save(tmp_path: Path) -> None:
    root_uri = leave(
        tmp_path,
        record(1, started_at=0.0, resumed_from=0, is_killed=True),
        record(2, started_at=3900.0, resumed_from=250, is_killed=False),
    )
    lines = [
        " ".join(line.replace("│", " ").split()) for line in printed(job(config_arg(root_uri))).splitlines()
    ]
    for told in (
        "compute 90.8 min 72.7%",  # 250 and 295 steps of 10 s, of 7,500 s
        "start-up 20 min 16.0%",
        "blocked by saving 100 s 1.3%",
        "lost work 7.5 min 6.0%",  # steps 251 to 295
        "idle 5 min 4.0%",
        "goodput 72.7% of 2.08 h",
        "interruptions 1, MTBF of the job 2 h, 15 min to the first new step",
        # sqrt(2 x 10 s x 7200 s)
        "checkpoint interval save every 38 steps (6.32 min); it was every 50. A save stalls training for 10 s; "
        "the job's MTBF was 2 h",
        "to plan with --node-mtbf-hours 4 --restart-seconds 900 --save-stall-seconds 10",
    ):
        assert told in lines


@pytest.mark.parametrize(("started_at", "is_told"), [(3600.0, False), (3599.99, False), (3000.0, True)])
def test_attempts_that_overlap_are_pointed_out(tmp_path: Path, started_at: float, is_told: bool) -> None:
    root_uri = leave(
        tmp_path,
        record(1, started_at=0.0, resumed_from=0, is_killed=True),
        record(2, started_at=started_at, resumed_from=250, is_killed=False),
    )
    told = printed(job(config_arg(root_uri)))
    assert ("10 min are told by two attempts at once" in told) == is_told


def test_what_was_measured_is_what_plan_takes(tmp_path: Path) -> None:
    root_uri = leave(
        tmp_path,
        record(1, started_at=0.0, resumed_from=0, is_killed=True),
        record(2, started_at=3900.0, resumed_from=250, is_killed=False),
    )
    measured = read_goodput(root_uri, is_over=True)
    assert measured is not None
    # Two nodes, as in the run: the planner's interval is the run's.
    settings = ["--settings", str(ROOT / "penstock.toml")]
    asked = ["plan", "tiny-zero2", "--json", "--nodes", "2", *plan_options(measured).split()]
    done = CliRunner().invoke(main, [*settings, *asked], catch_exceptions=False)
    best = measured.recommended_interval()
    assert best is not None
    intervals = {each["interval_seconds"] for each in json.loads(done.output)["options"]}
    assert list(intervals) == [pytest.approx(best.seconds)]


def test_a_killed_attempt_is_at_work_until_its_run_is_over(tmp_path: Path) -> None:
    root_uri = leave(tmp_path, record(1, started_at=0.0, resumed_from=0, is_killed=True))
    running, over = (read_goodput(root_uri, is_over=is_over) for is_over in (False, True))
    assert running is not None
    assert over is not None
    assert (running.interruptions, over.interruptions) == (0, 1)
    assert plan_options(running) == ""


class Unavailable(FileStorage):
    """Gives no object."""

    def read(self, uri: str, **_: object) -> bytes:
        raise StorageUnavailableError(f"{uri}: the service does not answer")


def test_storage_that_does_not_answer_is_said_and_no_more(tmp_path: Path) -> None:
    spec = job(config_arg(leave(tmp_path, record(1, started_at=0.0, resumed_from=0, is_killed=True))))
    told = printed(spec, storage=Unavailable())
    assert (
        told.strip()
        == f"goodput: not known: {tmp_path.as_uri()}/goodput/a1.json: the service does not answer"
    )
