"""What attempts come to: lost work, idle time, interruptions, and the interval that follows."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import pytest

from penstock_trainer.contract.fields import ContractError
from penstock_trainer.contract.goodput import (
    ASSUMED_MTBF_SECONDS,
    AttemptRecord,
    AttemptSeconds,
    Goodput,
    Mark,
    SaveTimes,
    goodput_dir_uri,
    join_attempts,
    readable_records,
    record_uri,
    told_seconds,
)


def attempt(token: int, **more: Any) -> AttemptRecord:
    """100 s from time 0: 10 start-up, 80 compute over 40 steps of 2 s, 4 saves of 2 s that take 3 s to be written, 2 restore."""
    record = AttemptRecord(
        format_version=1,
        attempt=f"a{token}",
        fencing_token=token,
        world_size=4,
        num_nodes=2,
        save_interval=10,
        started_at=0.0,
        updated_at=100.0,
        first_step_at=12.0,
        ended_at=100.0,
        outcome="done",
        resumed_from=0,
        last_step=40,
        committed_step=40,
        seconds=AttemptSeconds(startup=10.0, restore=2.0, compute=80.0, blocked_by_saving=8.0),
        saves=SaveTimes(taken=4, stall_seconds=8.0, committed=4, write_seconds=12.0),
        marks=tuple(Mark(step=step, compute_seconds=2.0 * step) for step in (10, 20, 30, 40)),
    )
    return replace(record, **more)


def killed(token: int, **more: Any) -> AttemptRecord:
    return attempt(token, **{"ended_at": None, "outcome": None, **more})


def later(token: int, *, at: float, resumed_from: int | None, **more: Any) -> AttemptRecord:
    """An attempt like `attempt` that starts at another time and trains on from a step."""
    start = resumed_from or 0
    moved: dict[str, Any] = {
        "started_at": at,
        "updated_at": at + 100.0,
        "first_step_at": at + 12.0,
        "ended_at": at + 100.0,
        "resumed_from": resumed_from,
        "last_step": start + 40,
        "committed_step": start + 40,
        "marks": tuple(Mark(step=start + step, compute_seconds=2.0 * step) for step in (10, 20, 30, 40)),
    }
    return attempt(token, **moved | more)


def assert_adds_up(goodput: Goodput, records: list[AttemptRecord]) -> None:
    """All that attempts recorded is in the parts, and nothing else but idle time."""
    told = sum(record.seconds.total for record in records)
    assert goodput.total_seconds == pytest.approx(told + goodput.idle)


def test_a_clean_run_loses_nothing() -> None:
    goodput = join_attempts([attempt(1)], is_over=True)
    assert (goodput.compute, goodput.lost_work, goodput.idle, goodput.interruptions) == (80.0, 0.0, 0.0, 0)
    assert goodput.total_seconds == 100.0
    assert goodput.share == 0.8
    assert goodput.step_seconds == 2.0
    assert goodput.mtbf_seconds is None
    assert goodput.told_interruptions() == "none seen"


def test_a_kill_loses_the_steps_after_the_checkpoint_that_the_next_attempt_continued_from() -> None:
    records = [killed(1, last_step=35, committed_step=30), later(2, at=130.0, resumed_from=30)]
    goodput = join_attempts(records, is_over=True)
    # Of its 80 s, 60 were spent until step 30.
    assert (goodput.compute, goodput.lost_work) == (140.0, 20.0)
    assert goodput.idle == 30.0  # from its last record to the next process
    assert goodput.interruptions == 1
    assert goodput.restart_seconds == 42.0  # to the first new step
    assert goodput.mtbf_seconds == 200.0  # of two attempts' time
    assert_adds_up(goodput, records)


def test_a_kill_before_the_first_checkpoint_loses_all_steps() -> None:
    records = [
        killed(1, last_step=35, committed_step=None, marks=(), saves=SaveTimes()),
        later(2, at=110.0, resumed_from=0),
    ]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.compute, goodput.lost_work) == (80.0, 80.0)


def test_an_attempt_that_reached_no_step_costs_its_start_up_and_decides_nothing() -> None:
    unstarted = replace(
        killed(2),
        started_at=110.0,
        updated_at=118.0,
        first_step_at=None,
        resumed_from=None,
        last_step=None,
        committed_step=None,
        seconds=AttemptSeconds(startup=8.0),
        saves=SaveTimes(),
        marks=(),
    )
    records = [killed(1), unstarted, later(3, at=120.0, resumed_from=40)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.lost_work, goodput.startup, goodput.idle) == (0.0, 28.0, 12.0)
    assert goodput.interruptions == 2
    # 18 s from the first to the end of the second, 14 s from there to a step: together what passed between steps.
    assert goodput.restart_seconds == (18.0 + 14.0) / 2
    assert_adds_up(goodput, records)


def test_a_fall_back_to_an_older_checkpoint_loses_the_work_of_several_attempts() -> None:
    records = [
        killed(1),
        killed(2, **moved(later(2, at=100.0, resumed_from=40))),
        later(3, at=200.0, resumed_from=20),  # those of 40 to 80 were damaged
    ]
    goodput = join_attempts(records, is_over=True)
    assert goodput.lost_work == 40.0 + 80.0
    assert goodput.compute == 40.0 + 80.0


def moved(record: AttemptRecord) -> dict[str, Any]:
    kept = ("attempt", "fencing_token", "format_version", "ended_at", "outcome")
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in kept}


@pytest.mark.parametrize(("skew", "idle", "overlap"), [(0.0, 30.0, 0.0), (-50.0, 0.0, 20.0)])
def test_attempts_are_in_the_order_of_their_tokens_whatever_their_clocks_say(
    skew: float, idle: float, overlap: float
) -> None:
    records = [killed(1), later(2, at=130.0 + skew, resumed_from=30)]
    goodput = join_attempts(list(reversed(records)), is_over=True)
    assert (goodput.lost_work, goodput.idle, goodput.overlap_seconds) == (20.0, idle, overlap)
    assert goodput.restart_seconds is not None
    assert goodput.restart_seconds >= 0
    assert_adds_up(goodput, records)


def test_an_attempt_that_went_on_until_it_was_fenced_overlaps_and_its_steps_are_lost() -> None:
    fenced = attempt(1, outcome="failed")
    records = [fenced, later(2, at=60.0, resumed_from=20)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.lost_work, goodput.idle, goodput.overlap_seconds) == (40.0, 0.0, 40.0)
    assert goodput.interruptions == 0
    assert_adds_up(goodput, records)


def test_an_attempt_without_a_record_is_counted_and_its_time_is_idle() -> None:
    records = [killed(1), later(4, at=300.0, resumed_from=40)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.attempts, goodput.unrecorded_attempts, goodput.idle) == (2, 2, 200.0)
    assert goodput.told_interruptions().endswith("; 2 attempts left no record")


def test_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="no record to join"):
        join_attempts([])


def test_nobody_waits_for_a_run_that_had_ended_by_itself() -> None:
    records = [attempt(1), later(2, at=5000.0, resumed_from=40)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.idle, goodput.interruptions, goodput.total_seconds) == (0.0, 0, 200.0)


def test_a_preempted_attempt_that_saved_its_last_step_is_an_interruption_without_lost_work() -> None:
    records = [attempt(1, outcome="preempted"), later(2, at=110.0, resumed_from=40)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.interruptions, goodput.lost_work, goodput.idle) == (1, 0.0, 10.0)


def test_the_newest_attempt_is_at_work_until_the_run_is_over() -> None:
    record = killed(1, last_step=35, committed_step=30)
    running = join_attempts([record])
    assert (running.interruptions, running.lost_work) == (0, 0.0)
    over = join_attempts([record], is_over=True)
    assert (over.interruptions, over.lost_work) == (1, 20.0)
    assert over.restart_seconds is None


def test_between_marks_steps_count_alike() -> None:
    marks = (Mark(step=10, compute_seconds=40.0), Mark(step=20, compute_seconds=50.0))
    record = attempt(1, last_step=40, marks=marks)
    spent = [record.compute_until(step) for step in (-1, 0, 5, 10, 15, 20, 30, 40, 99)]
    assert spent == [0.0, 0.0, 20.0, 40.0, 45.0, 50.0, 65.0, 80.0, 80.0]


def test_a_save_right_after_the_resume_does_not_confuse_the_count() -> None:
    marks = (Mark(step=20, compute_seconds=1.0),)
    record = attempt(1, resumed_from=20, last_step=40, marks=marks)
    assert record.compute_until(30) == pytest.approx(1.0 + 79.0 / 2)


def test_a_checkpoint_newer_than_the_last_record_of_its_attempt_loses_nothing() -> None:
    records = [killed(1, last_step=35, committed_step=30), later(2, at=130.0, resumed_from=40)]
    goodput = join_attempts(records, is_over=True)
    assert (goodput.lost_work, goodput.compute, goodput.idle) == (0.0, 160.0, 30.0)


def test_what_a_roll_back_undid_is_lost_work() -> None:
    seconds = AttemptSeconds(startup=10.0, compute=70.0, rolled_back=20.0)
    goodput = join_attempts([attempt(1, seconds=seconds)], is_over=True)
    assert (goodput.compute, goodput.lost_work, goodput.total_seconds) == (70.0, 20.0, 100.0)


def test_the_interval_follows_from_the_measured_stall_and_rate() -> None:
    records = [killed(1), later(2, at=130.0, resumed_from=30)]
    goodput = join_attempts(records, is_over=True)
    best = goodput.recommended_interval()
    assert best is not None
    # sqrt(2 x 2 s x 200 s) = 28.3 s, at 2 s a step; worked out by hand.
    assert (best.seconds, best.steps, best.is_mtbf_assumed) == (pytest.approx(28.284, abs=1e-3), 14, False)
    assert goodput.told_interval() == (
        "save every 14 steps (28.3 s); it was every 10. A save stalls training for 2 s; the job's MTBF was 3.33 min"
    )


def test_an_interval_without_any_interruption_says_what_it_assumes() -> None:
    goodput = join_attempts([attempt(1)], is_over=True)
    best = goodput.recommended_interval()
    assert best is not None
    assert (best.mtbf_seconds, best.is_mtbf_assumed) == (ASSUMED_MTBF_SECONDS, True)
    assert "no interruption was seen, and an MTBF of 8 h is assumed" in goodput.told_interval()


def test_saves_are_not_recommended_faster_than_they_are_written() -> None:
    slow = SaveTimes(taken=4, stall_seconds=0.004, committed=4, write_seconds=160.0)
    goodput = join_attempts([attempt(1, saves=slow)], is_over=True)
    best = goodput.recommended_interval()
    assert best is not None
    assert (best.seconds, best.steps, best.is_bound_by_writing) == (40.0, 20, True)
    assert "takes 40 s to be written" in goodput.told_interval()


@pytest.mark.parametrize(
    "without", [{"saves": SaveTimes()}, {"resumed_from": None, "last_step": None, "marks": ()}]
)
def test_no_interval_without_a_save_or_a_step(without: dict[str, Any]) -> None:
    goodput = join_attempts([attempt(1, **without)], is_over=True)
    assert goodput.recommended_interval() is None
    assert goodput.told_interval() == "not known: no save was measured"


def test_the_line_of_a_run_names_each_part_that_it_has() -> None:
    records = [killed(1, last_step=35, committed_step=30), later(2, at=130.0, resumed_from=30)]
    assert join_attempts(records, is_over=True).told() == (
        "goodput 60.9% of 3.83 min in 2 attempts: compute 2.33 min, start-up 20 s, restore 4 s, "
        "blocked by saving 16 s, lost work 20 s, idle 30 s"
    )


def test_a_record_is_its_json() -> None:
    record = attempt(7, outcome="preempted")
    assert AttemptRecord.from_json(record.to_json()) == record
    assert AttemptRecord.from_json(killed(7).to_json()) == killed(7)


def test_what_is_no_record_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    newer = attempt(2).to_json().replace('"format_version":1', '"format_version":9')
    objects = {
        "file:///r/goodput/a.json": attempt(1).to_json().encode(),
        "file:///r/goodput/b.json": newer.encode(),
        "file:///r/goodput/c.json": b"{",
    }
    with caplog.at_level(logging.WARNING):
        assert readable_records(objects) == [attempt(1)]
    left_out = [message.partition(" is left out")[0] for message in caplog.messages]
    assert left_out == list(objects)[1:]
    with pytest.raises(ContractError, match="format 9 is not known here"):
        AttemptRecord.from_json(newer)


def test_records_lie_side_by_side_below_the_root() -> None:
    assert goodput_dir_uri("gs://b/run/") == "gs://b/run/goodput"
    assert record_uri("gs://b/run", "a1") == "gs://b/run/goodput/a1.json"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0123, "12.3 ms"), (0.5, "0.5 s"), (119.0, "119 s"), (300.0, "5 min"), (28800.0, "8 h"), (864000.0, "10 days")],
)  # fmt: skip
def test_durations_are_told_in_a_unit_that_suits_them(seconds: float, told: str) -> None:
    assert told_seconds(seconds) == told
