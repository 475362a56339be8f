"""Loops that are run in turns."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.harness import Arm, StepDone, interleave


def loop(name: str, told: list[str], *, steps: int = 4, seconds: float = 0.0) -> Arm:
    """It says when it does a step, and computes for so long in each."""

    def fit(step_done: StepDone) -> None:
        for _ in range(steps):
            step_done()
            told.append(name)
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

    return Arm(name, fit)


def raising_at(number: int) -> Arm:
    def fit(step_done: StepDone) -> None:
        for _ in range(number):
            step_done()
        raise OSError("no space")

    return Arm("raising", fit)


def test_every_second_round_goes_back_through_the_arms() -> None:
    told: list[str] = []

    interleave([loop(name, told, steps=9) for name in "abc"], steps=9, warmup=0)

    # The first turn of each ends at its first boundary, so what is told begins with the way back of the first round.
    ways = ["".join(told[at : at + 3]) for at in range(3, 21, 3)]
    assert all(sorted(way) == ["a", "b", "c"] for way in ways)
    assert [way[::-1] for way in ways[::2]] == ways[1::2]
    assert len(set(ways[::2])) > 1, "the order is drawn anew"


def test_turns_of_several_steps_are_not_cut() -> None:
    told: list[str] = []

    outcome = interleave([loop(name, told) for name in "ab"], steps=4, warmup=0, steps_per_turn=2)

    assert "".join(told) == "bbaaaabb"
    assert len(outcome.costs["a"].step_seconds) == 1


def test_a_step_costs_the_time_of_its_own_thread() -> None:
    told: list[str] = []

    outcome = interleave(
        [loop("slow", told, steps=6, seconds=0.02), loop("quick", told, steps=6, seconds=0.005)],
        steps=6,
        warmup=0,
    )

    # thread_time of a loop that spins until a thread time; what is above is the boundary's own microseconds.
    assert outcome.costs["slow"].step_seconds == pytest.approx(np.full(5, 0.02), rel=0.2)
    assert outcome.costs["quick"].step_seconds == pytest.approx(np.full(5, 0.005), rel=0.2)
    assert (outcome.costs["slow"].process_seconds >= 0.02).all()


def test_warm_up_steps_are_left_out() -> None:
    outcome = interleave([loop("a", [], steps=8)], steps=8, warmup=3)

    assert len(outcome.costs["a"].step_seconds) == 8 - 1 - 3


def test_an_arm_that_fails_stops_no_other() -> None:
    told: list[str] = []

    outcome = interleave([raising_at(2), loop("a", told)], steps=4, warmup=0)

    assert told == ["a"] * 4
    assert set(outcome.costs) == {"a"}
    assert isinstance(outcome.errors["raising"], OSError)


@pytest.mark.parametrize("steps", [3, 5])
def test_an_arm_with_another_number_of_steps_is_no_pair(steps: int) -> None:
    outcome = interleave([loop("other", [], steps=steps), loop("a", [])], steps=4, warmup=0)

    assert set(outcome.costs) == {"a"}
    assert f"other has done {steps} steps instead of 4" in str(outcome.errors["other"])
