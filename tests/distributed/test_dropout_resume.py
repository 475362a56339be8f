"""Dropout's masks after a resume are those of the run that was not interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import losses_by_scenario, tiny_config
from penstock_trainer.contract.config import Strategy
from penstock_trainer.testing import run_ranks

STRATEGIES: tuple[Strategy, ...] = ("fsdp-full", "zero2")
DROPOUT = 0.1


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """By scenario: `whole`, and `dropped` (saved at step 4, gone after step 6) and `resumed` on one root."""
    directory = tmp_path_factory.mktemp("dropout")
    data_uri = build_dataset(directory / "dataset")
    scenarios: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        for name, root, dropout, drop_out_at in (
            ("whole", "whole", DROPOUT, None),
            ("dropped", "interrupted", DROPOUT, 6),
            ("resumed", "interrupted", DROPOUT, None),
            ("without", "without", 0.0, None),
        ):
            config = tiny_config(data_uri, (directory / f"{strategy}-{root}").as_uri(), strategy=strategy)
            config = replace(config, model=replace(config.model, dropout=dropout))
            scenarios.append(
                {"name": f"{strategy} {name}", "config": config.to_json(), "drop_out_at": drop_out_at}
            )
    ranks = run_ranks("distributed.training_ranks", [json.dumps(scenarios)], world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
    return losses_by_scenario(ranks[0].stdout)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_with_dropout_is_the_uninterrupted_one_bit_by_bit(
    losses: dict[str, dict[int, float]], strategy: Strategy
) -> None:
    whole = losses[f"{strategy} whole"]
    assert losses[f"{strategy} dropped"] == {step: whole[step] for step in range(1, 7)}
    assert losses[f"{strategy} resumed"] == {step: whole[step] for step in range(5, 13)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_is_at_work(losses: dict[str, dict[int, float]], strategy: Strategy) -> None:
    whole, without = losses[f"{strategy} whole"], losses[f"{strategy} without"]
    assert all(whole[step] != without[step] for step in whole)
