"""Buffers, as BatchNorm's statistics, are part of a run: one set over all ranks, saved, resumed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import normalised
from distributed.tiny_run import events_by_scenario, tiny_engine
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)
from penstock_trainer.contract.events import EvaluationEvent
from penstock_trainer.export import read_export
from penstock_trainer.testing import run_ranks

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-full", "zero1", "zero3")
EVALUATED = (3, 6, 8)


def config(root: str, strategy: Strategy) -> JobConfig:
    return JobConfig(
        model=ModelConfig(source="distributed.normalised:model"),
        data=DataConfig(source="distributed.normalised:samples"),
        optim=OptimConfig(learning_rate=0.02, warmup_steps=2),
        engine=tiny_engine(strategy),
        checkpoint=CheckpointConfig(uri=root, interval=4),
        evaluation=EvaluationConfig(interval=3),
        steps=8,
        global_batch=8,
        max_micro_batch=4,
        log_interval=1,
    )


class Runs:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        scenarios: list[dict[str, Any]] = []
        for strategy in STRATEGIES:
            for name, drop_out_at in (("whole", None), ("resumed", 5), ("resumed", None)):
                root = directory / f"{strategy}-{name}"
                scenarios.append(
                    {
                        "name": f"{strategy} {name}",
                        "config": config(root.as_uri(), strategy).to_json(),
                        "drop_out_at": drop_out_at,
                        "model_dir": (root / "export").as_uri(),
                    }
                )
        ranks = run_ranks(
            "distributed.training_ranks", [json.dumps(scenarios)], world_size=2, timeout_seconds=200.0
        )
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
        self.held_out = {
            name: {event.step: event.loss for event in events if isinstance(event, EvaluationEvent)}
            for name, events in events_by_scenario(ranks[0].stdout).items()
        }

    def export_uri(self, run: str) -> str:
        return (self.directory / run.replace(" ", "-") / "export").as_uri()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("statistics"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_scores_as_the_uninterrupted_one(runs: Runs, strategy: Strategy) -> None:
    whole, resumed = runs.held_out[f"{strategy} whole"], runs.held_out[f"{strategy} resumed"]
    assert tuple(whole) == EVALUATED
    assert resumed == whole


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_export_has_the_statistics_with_which_it_was_scored(runs: Runs, strategy: Strategy) -> None:
    model = read_export(runs.export_uri(f"{strategy} whole")).model
    data = [normalised.samples(split="evaluation")[index] for index in range(64)]
    with torch.no_grad():
        logits = model.eval()(torch.stack([torch.as_tensor(sample["features"]) for sample in data]))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([sample["labels"] for sample in data]))
    assert loss.item() == pytest.approx(runs.held_out[f"{strategy} whole"][8], abs=5e-6)
    assert model.get_buffer("layers.1.num_batches_tracked") == 8
