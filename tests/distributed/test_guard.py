"""A batch that makes the loss infinite, or far too high: what every strategy does about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import poisonable
from distributed.tiny_run import LOSS_TOLERANCE, losses_by_scenario, tiny_engine
from numerics.plain_torch import train_plainly
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.order import sample_order
from penstock_trainer.data.user_dataset import UserDataset, UserSamples
from penstock_trainer.model.build import build_model
from penstock_trainer.model.objective import Objective
from penstock_trainer.testing import run_ranks

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3")
STEPS, BATCH, SAVED, POISONED = 12, 4, 8, 10
"""The tenth step has the bad sample; the newest checkpoint before it is that of the eighth."""


def config(root: str, strategy: Strategy, guard: GuardConfig, *, weakness: float = 0.0) -> JobConfig:
    seed = 3
    bad = sample_order(BATCH * (POISONED - 1), 1, size=poisonable.SIZE, seed=seed).tolist()
    return JobConfig(
        model=ModelConfig(source="distributed.poisonable:model"),
        data=DataConfig(
            source="distributed.poisonable:samples", options={"poisoned": bad, "weakness": weakness}
        ),
        optim=OptimConfig(learning_rate=0.02, warmup_steps=2),
        engine=tiny_engine(strategy),
        checkpoint=CheckpointConfig(uri=root, interval=SAVED),
        guard=guard,
        steps=STEPS,
        global_batch=BATCH,
        max_micro_batch=1,
        log_interval=4,  # the step is judged later than it is run
        seed=seed,
    )


def plain_losses(
    config: JobConfig, batches: Sequence[int], *, left_out: int | None = None
) -> dict[int, float]:
    """By step, over these global batches; the update of one step may be left out."""
    dataset = UserDataset(config.data, "train")
    samples = UserSamples(dataset, global_batch=config.global_batch, seed=config.seed)
    plan = BatchPlan(per_rank=BATCH, micro_batch=BATCH, accumulation=1)
    losses = train_plainly(
        Objective(build_model(config.model, vocab_size=None, seed=config.seed)),
        config,
        lambda step: samples.step(batches[step] * BATCH, plan).batches[0],
        steps=len(batches),
        left_out=None if left_out is None else left_out - 1,
    )
    return dict(enumerate(losses, start=1))


class Runs:
    """All strategies on two ranks, each with each answer."""

    def __init__(self, directory: Path) -> None:
        scenarios: list[dict[str, Any]] = []
        guards = {
            "skip": (GuardConfig(on_non_finite="skip"), 0.0),
            "roll back": (GuardConfig(on_non_finite="roll-back"), 0.0),
            "spike": (GuardConfig(on_spike="roll-back", spike_window=8), 1e-3),
        }
        for strategy in STRATEGIES:
            for name, (guard, weakness) in guards.items():
                root = (directory / f"{strategy}-{name}").as_uri()
                told = config(root, strategy, guard, weakness=weakness)
                if name == "skip":  # every step is compared
                    told = replace(told, log_interval=1)
                scenarios.append({"name": f"{strategy} {name}", "config": told.to_json()})
        ranks = run_ranks(
            "distributed.training_ranks", [json.dumps(scenarios)], world_size=2, timeout_seconds=200.0
        )
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
        self.losses = losses_by_scenario(ranks[0].stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_leaves_no_trace_in_any_strategy(
    runs: Runs, strategy: Strategy
) -> None:
    expected = plain_losses(config("unused", strategy, GuardConfig()), range(STEPS), left_out=POISONED)
    found = runs.losses[f"{strategy} skip"]
    assert not torch.isfinite(torch.tensor([expected.pop(POISONED), found.pop(POISONED)])).any()
    assert found == pytest.approx(expected, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize(("answer", "weakness"), [("roll back", 0.0), ("spike", 1e-3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_roll_back_continues_from_the_checkpoint_with_later_data(
    runs: Runs, strategy: Strategy, answer: str, weakness: float
) -> None:
    # Steps 9 to 12 ran and were judged with the log line of step 12: their 4 batches are left out.
    batches = [*range(SAVED), *range(STEPS, STEPS + STEPS - SAVED)]
    expected = plain_losses(config("unused", strategy, GuardConfig(), weakness=weakness), batches)
    found = runs.losses[f"{strategy} {answer}"]
    assert found == pytest.approx({step: expected[step] for step in (1, 4, 8, 12)}, abs=LOSS_TOLERANCE)
