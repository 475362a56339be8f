"""What of all ranks a line shows."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_trainer.contract.events import StepEvent
from penstock_trainer.observe.rank_report import RankReport, shown


def report(**more: Any) -> RankReport:
    seconds = {
        "data": 0.1,
        "forward": 1.0,
        "backward": 2.0,
        "optimizer": 0.4,
        "checkpoint": 0.0,
        "evaluation": 0.0,
    }
    seconds.update(more.pop("seconds", {}))
    fields: dict[str, Any] = {
        "step_seconds": 4.0,
        "communication_seconds": 0.5,
        "peak_memory_bytes": 100,
        "utilization": None,
    }
    return RankReport(seconds=seconds, **{**fields, **more})  # type: ignore[arg-type]  # keys are parts


def test_the_split_is_that_of_the_rank_the_others_wait_for() -> None:
    reports = [
        report(communication_seconds=1.5),
        report(communication_seconds=0.1, seconds={"forward": 1.2}, step_seconds=4.1),
        report(communication_seconds=1.0),
    ]
    told = shown(reports)
    assert told["slowest_rank"] == 1
    assert (told["step_seconds"], told["forward_seconds"]) == (4.1, 1.2)
    assert told["communication_seconds"] == 0.1
    assert told["slowest_rank_seconds"] == pytest.approx(0.1 + 1.2 + 2.0 + 0.4 - 0.1)
    assert told["median_rank_seconds"] == pytest.approx(3.5 - 1.0)


def test_what_one_rank_does_not_know_nobody_guesses() -> None:
    told = shown([report(), report(communication_seconds=None, seconds={"forward": 9.0})])
    assert told["slowest_rank"] is told["slowest_rank_seconds"] is told["median_rank_seconds"] is None
    assert told["forward_seconds"] == 1.0  # rank 0's
    assert told["communication_seconds"] == 0.5


def test_memory_is_the_most_and_utilization_the_mean_of_those_that_tell() -> None:
    told = shown(
        [
            report(peak_memory_bytes=5, utilization=0.5),
            report(peak_memory_bytes=7, utilization=1.0),
            report(),
        ]
    )
    assert told["peak_memory_bytes"] == 100
    assert told["accelerator_utilization"] == 0.75
    assert shown([report()])["accelerator_utilization"] is None


def test_communication_that_computation_hides_is_no_negative_time() -> None:
    assert report(communication_seconds=99.0).own_seconds == 0


def test_every_field_is_one_of_the_line() -> None:
    assert set(shown([report()])) <= set(StepEvent.__slots__)
