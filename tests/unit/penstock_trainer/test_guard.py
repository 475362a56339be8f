"""What is called wrong, and what follows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from penstock_trainer.contract.config import GuardConfig
from penstock_trainer.engines.engine import StepResult
from penstock_trainer.errors import DivergedError
from penstock_trainer.guard import Guard, Judgement
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


def guard_of(*, scales_loss: bool = False, **config: object) -> Guard:
    return Guard(GuardConfig(**config), scales_loss=scales_loss, device=CPU)  # type: ignore[arg-type]


def judged(guard: Guard, *steps: tuple[float, float], first: int = 1) -> Judgement:
    """Of (loss, gradient's norm) of steps in a row."""
    for number, (loss, norm) in enumerate(steps, start=first):
        guard.saw(number, StepResult(torch.tensor(loss), torch.tensor(norm)))
    return guard.judge()


def test_a_step_that_is_judged_late_is_named_by_its_number() -> None:
    with pytest.raises(DivergedError, match=r"the loss of step 2 is nan and its gradient's norm nan"):
        judged(guard_of(), (2.0, 1.0), (math.nan, math.nan), (2.0, 1.0))


def test_an_infinite_gradient_alone_is_enough() -> None:
    with pytest.raises(DivergedError, match=r"step 1 is 2.0 and its gradient's norm inf"):
        judged(guard_of(), (2.0, math.inf))


def test_skipped_steps_are_counted_and_their_number_is_bounded() -> None:
    guard = guard_of(on_non_finite="skip", max_skips=2)
    assert judged(guard, (2.0, 1.0), (math.nan, math.nan)).skipped == 1
    assert judged(guard, (2.0, math.inf), (2.0, 1.0), first=3).skipped == 1
    with pytest.raises(DivergedError, match=r"the updates of 3 steps were left out.*max_skips is 2.*step 5"):
        judged(guard, (2.0, math.inf), first=5)


def test_in_fp16_an_overflow_is_how_the_loss_scale_is_found() -> None:
    guard = guard_of(scales_loss=True, max_skips=1)
    assert judged(guard, *[(2.0, math.inf)] * 5).skipped == 5
    with pytest.raises(DivergedError, match="the loss of step 6 is nan"):
        judged(guard, (math.nan, math.nan), first=6)


def test_the_last_step_is_told_over_all_of_them() -> None:
    last = judged(guard_of(), (3.0, 0.5), (2.0, 0.25)).last
    assert (last.number, last.loss, last.grad_norm) == (2, 2.0, 0.25)


def test_a_loss_far_above_the_window_is_a_spike_and_a_noisy_one_is_not() -> None:
    noisy = [(2.0 + 0.1 * math.sin(step), 1.0) for step in range(32)]
    guard = guard_of(on_spike="stop", spike_window=32)
    judged(guard, *noisy, (2.3, 1.0))
    with pytest.raises(DivergedError, match=r"step 34 is 6.0000, above .*: a spike"):
        judged(guard, (6.0, 1.0), first=34)


def test_losses_that_hardly_differ_make_no_spike_of_a_small_rise() -> None:
    assert not judged(guard_of(on_spike="stop", spike_window=8), *[(2.0, 1.0)] * 8, (2.1, 1.0)).roll_back


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert not judged(guard_of(on_spike="stop", spike_window=8), *[(2.0, 1.0)] * 7, (9.0, 1.0)).roll_back


def test_roll_backs_are_bounded() -> None:
    guard = guard_of(on_non_finite="roll-back", max_roll_backs=1)
    assert "step 1" in judged(guard, (math.nan, 1.0)).roll_back
    with pytest.raises(DivergedError, match=r"after 1 roll-backs \(guard.max_roll_backs\)"):
        judged(guard, (math.nan, 1.0))
