"""Training on the stand-in while things go wrong: what is promised of each fault, with the real trainer on two nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from contract.vertex.stand_in import Rest, start
from e2e.fault_jobs import INTERVAL, FaultJobs
from penstock_pipelines.fault_evidence import Row

# Each job takes 10 s on two idle cores and a minute on busy ones.
pytestmark = pytest.mark.timeout(600)

Faults = Sequence[Mapping[str, Any]]
CHECKPOINTS = "checkpoints/"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultJobs]:
    directory = tmp_path_factory.mktemp("faults")
    stand_in = start(directory)
    with closing(Rest(stand_in)) as rest:
        made = FaultJobs(stand_in, rest, directory)
        made.stage()
        yield made
    assert stand_in.stop() == 0, stand_in.log.read_text()
    assert "Traceback" not in stand_in.log.read_text(), stand_in.log.read_text()


def survived(jobs: FaultJobs, name: str, faults: Faults) -> list[Row]:
    """Rows of a run that ended with the losses of the clean one, hex for hex, and lost no checkpoint."""
    state, rows = jobs.rows(name, faults)
    assert state == "JOB_STATE_SUCCEEDED", rows
    assert all(row.ok for row in rows), rows
    assert {row.samples_off for row in rows} == {0}
    return rows


def test_a_lost_writer_and_a_burst_of_503_cost_no_step(jobs: FaultJobs) -> None:
    writer, burst = survived(
        jobs,
        "small",
        [
            {"do": "kill", "process": "writer", "rank": 0, "at_step": 12},
            {"do": "storage", "kind": "refuse", "match": CHECKPOINTS, "requests": 10, "at_step": 22},
        ],
    )
    assert "the writer of rank 0 was lost" in writer.detected_by
    assert (writer.restarted_in, writer.steps_lost) == ("its writer", 0)
    assert "(10 struck)" in burst.done
    assert (burst.restarted_in, burst.steps_lost) == ("not needed", 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "noticed", "restarted_in", "most_lost"),
    [
        ({"do": "kill", "process": "rank", "rank": 1}, "rank 1", "ranks in place", 2 * INTERVAL),
        (
            {"do": "kill", "process": "launcher", "replica": "workerpool1-0"},
            "ended with status 137",
            "whole job",
            2 * INTERVAL,
        ),
        ({"do": "preempt", "replica": "workerpool1-0"}, "was preempted", "whole job", 2 * INTERVAL),
        (
            {"do": "preempt", "replica": "workerpool1-0", "notice_seconds": 30},
            "SIGTERM: ranks have",
            "whole job",
            0,
        ),
        ({"do": "restart-job"}, "the whole job restarts", "whole job", 2 * INTERVAL),
        ({"do": "hang", "process": "rank", "rank": 1}, "rank", "ranks in place", 2 * INTERVAL),
        ({"do": "damage", "how": "flip"}, ".distcp", "whole job", 3 * INTERVAL),
        ({"do": "damage", "how": "cut"}, ".distcp", "whole job", 3 * INTERVAL),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_lost_part_costs_a_few_steps_and_no_sample(
    jobs: FaultJobs, fault: Mapping[str, Any], noticed: str, restarted_in: str, most_lost: int
) -> None:
    """A save takes longer than the few steps between two, so a kill may find the one before it not yet committed."""
    name = "-".join(str(value) for value in fault.values())
    [row] = survived(jobs, name, [{**fault, "at_step": 22}])
    assert noticed in row.detected_by
    assert row.restarted_in == restarted_in
    assert row.steps_lost <= most_lost
    assert row.seconds_to_new_step is not None


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "slow", "delay_seconds": 0.5, "seconds": 5},
        {"kind": "refuse", "status": 429, "requests": 10},
        {"kind": "wrong-date", "hours": -30},
        {"kind": "reset", "only": "writes", "requests": 3},
        {"kind": "reset", "only": "reads", "requests": 3},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())),
)
def test_storage_that_misbehaves_costs_time_only(jobs: FaultJobs, fault: Mapping[str, Any]) -> None:
    name = "-".join(str(value) for value in fault.values()).replace(".", "-")
    [row] = survived(jobs, name, [{"do": "storage", "match": CHECKPOINTS, "at_step": 12, **fault}])
    assert "struck)" in row.done
    assert (row.restarted_in, row.steps_lost) == ("not needed", 0)


@pytest.mark.full
def test_a_checkpoint_that_comes_half_is_passed_over(jobs: FaultJobs) -> None:
    truncated, _ = survived(
        jobs,
        "truncate",
        [
            {"do": "storage", "kind": "truncate", "match": r"\.distcp$", "requests": 1, "at_step": 12},
            {"do": "restart-job", "at_step": 22},
        ],
    )
    assert "(1 struck)" in truncated.done


@pytest.mark.full
def test_a_late_node_is_waited_for(jobs: FaultJobs) -> None:
    [row] = survived(jobs, "late", [{"do": "delay-start", "replica": "workerpool1-0", "seconds": 10}])
    assert row.steps_lost == 0
    assert row.seconds_to_new_step is not None
    assert row.seconds_to_new_step > 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"do": "storage", "kind": "read-only", "match": CHECKPOINTS}, "not permitted (403)"),
        ({"do": "out-of-memory", "process": "rank", "rank": 1}, "memory"),
    ],
    ids=["read-only", "out-of-memory"],
)
def test_a_permanent_fault_ends_the_job_with_its_reason_and_loses_nothing_committed(
    jobs: FaultJobs, fault: Mapping[str, Any], told: str
) -> None:
    state, [row] = jobs.rows("-".join(map(str, fault.values())).replace("/", ""), [{**fault, "at_step": 22}])
    assert state == "JOB_STATE_FAILED"
    assert told in row.detected_by
    assert row.verdict == "ended, nothing committed was lost"
    assert row.ok
