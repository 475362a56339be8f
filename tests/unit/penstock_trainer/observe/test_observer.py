"""A line, and what is counted between two of them, in a world of one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.config import JobConfig, ObserveConfig
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.guard import Judgement, Step
from penstock_trainer.observe.clock import HostClock
from penstock_trainer.observe.observer import Observer
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

CONFIG = JobConfig(observe=ObserveConfig(peak_tflops=1e-9))  # 1000 FLOP/s


class Seen:
    def __init__(self, root: Path, world: World) -> None:
        self.clock = HostClock()
        self.progress = Progress()
        self.observer = Observer(
            CONFIG,
            world,
            self.clock,
            flops_per_token=2.0,
            root_uri=root.as_uri(),
            owner=Owner(attempt="a", fencing_token=1),
            progress=self.progress,
        )

    def step(self, *, skipped: int = 0, loss: float = 1.0) -> Judgement:
        self.progress = self.progress.after(samples=4, targets=40)
        with self.clock.span("forward"):
            time.sleep(0.01)
        judgement = Judgement(last=Step(self.progress.step, loss, 1.0), skipped=skipped)
        self.observer.judged(judgement)
        return judgement

    def line(self, judgement: Judgement) -> StepEvent:
        return self.observer.line(self.progress, judgement, learning_rate=0.1)


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    with World.join(RankEnv(), timeout_seconds=20) as world:
        yield Seen(tmp_path, world)


def test_steps_left_out_are_counted_from_line_to_line(seen: Seen) -> None:
    seen.step(skipped=1)  # judged for a checkpoint, without a line
    line = seen.line(seen.step(skipped=2))
    assert line.skipped_steps == 3
    assert seen.line(seen.step()).skipped_steps == 0


def test_seconds_are_per_step_and_rates_over_all_of_them(seen: Seen) -> None:
    seen.step()
    line = seen.line(seen.step())
    assert line.step_seconds is not None
    assert line.forward_seconds is not None
    assert 0.01 <= line.forward_seconds <= line.step_seconds
    assert line.samples_per_second == pytest.approx(4 / line.step_seconds)
    assert line.tokens_per_second == pytest.approx(40 / line.step_seconds)
    assert line.mfu == pytest.approx(line.tokens_per_second * 2 / 1000)
    assert (line.communication_seconds, line.slowest_rank) == (0.0, 0)


def test_after_a_roll_back_nothing_of_before_is_counted(seen: Seen) -> None:
    seen.step(skipped=5)
    seen.observer.begin_anew(Progress())
    seen.progress = Progress()
    line = seen.line(seen.step())
    assert line.skipped_steps == 0
    assert line.forward_seconds is not None
    assert line.forward_seconds < 0.02


def test_what_is_not_finite_is_no_number(seen: Seen) -> None:
    line = seen.line(seen.step(loss=math.nan))
    assert line.loss is None
