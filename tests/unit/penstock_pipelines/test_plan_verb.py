"""`penstock plan`: what it computes, what follows from what is given, and what it says of what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from compiled import ROOT
from penstock_components.planning.goodput import Interruptions
from penstock_pipelines.cli import main
from penstock_pipelines.plan import Question, model_shape, plan
from penstock_pipelines.recipes import find_recipe
from penstock_trainer.contract.config import JobConfig, ModelConfig

PRICES = """
currency = "EUR"
source = "for a test"
date = 2026-11-21
[[machines]]
machine_type = "a2-highgpu-8g"
region = "us-central1"
per_hour = 30.0
"""


def told(*arguments: str) -> Result:
    settings = ["--settings", str(ROOT / "penstock.toml")]
    return CliRunner().invoke(main, [*settings, "plan", *arguments], catch_exceptions=False)


def options(*arguments: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    made = json.loads(told("tiny-zero2", "--json", *arguments).output)["options"]
    return {(each["machine_type"], each["num_nodes"], each["strategy"]): each for each in made}


def test_each_combination_is_there_with_its_reason_where_it_cannot_be() -> None:
    found = options(
        "--machine",
        "a2-highgpu-8g",
        "--machine",
        "n1-highcpu-16",
        "--machine",
        "a2-highgpu-9g",
        "--nodes",
        "2",
        "--nodes",
        "3",
    )
    assert len(found) == 3 * 2 * 6
    assert found["a2-highgpu-8g", 2, "zero2"]["feasible"]
    assert "multiple of the 24 ranks" in found["a2-highgpu-8g", 3, "zero2"]["reason"]
    assert "no GPU" in found["n1-highcpu-16", 2, "ddp"]["reason"]
    assert "Did you mean" in found["a2-highgpu-9g", 2, "ddp"]["reason"]


def test_a_model_that_does_not_fit_is_said_to_need_more_and_for_what() -> None:
    recipe = find_recipe("tiny-zero2")
    model = ModelConfig(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336)
    large = replace(recipe, config=replace(recipe.config, model=model))
    made = plan(
        large, Question(node_counts=(1, 16), strategies=("ddp", "fsdp-full"), machines=("a2-highgpu-1g",))
    )
    reasons = {(each.num_nodes, each.strategy): each.reason for each in made.options}
    assert "GB of 38.0: optimizer" in reasons[1, "ddp"]
    assert reasons[16, "ddp"].startswith("a rank needs")
    assert not reasons[16, "fsdp-full"]


def test_hours_cost_and_losses_follow_from_what_is_given(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    given = [
        "--machine",
        "a2-highgpu-8g",
        "--strategy",
        "ddp",
        "--tokens",
        "57600000",
        "--tokens-per-second",
        "1000",
    ]
    priced = ["--prices", str(tmp_path / "prices.toml"), "--location", "us-central1"]
    one = options(*given, *priced, "--nodes", "1")["a2-highgpu-8g", 1, "ddp"]
    assert one["hours"] == pytest.approx(2.0)  # 57.6e6 tokens over 8 accelerators of 1,000 a second
    assert one["price"] == pytest.approx(60.0)
    lost = Interruptions(node_mtbf_hours=10, restart_seconds=600, save_stall_seconds=5)
    spot = options(*given, "--nodes", "2", "--node-mtbf-hours", "10")["a2-highgpu-8g", 2, "ddp"]
    assert spot["goodput"] == pytest.approx(lost.goodput(2, lost.best_interval_seconds(2)))
    assert spot["hours"] == pytest.approx(1 / spot["goodput"])
    assert spot["interruptions"] == pytest.approx(spot["hours"] / 5)


def test_what_was_not_given_is_said_to_be_missing() -> None:
    text = told("tiny-zero2").output
    assert "hours: not known; give --tokens-per-second" in text
    assert "cost: not known; give --prices" in text


def test_the_traffic_that_reducers_help_with_is_told_apart() -> None:
    assert "in all-reduce" in told("tiny-zero2", "--strategy", "zero2").output
    assert "in all-reduce" not in told("tiny-zero2", "--strategy", "zero3").output


def test_reducers_are_weighed_against_what_they_cost(tmp_path: Path) -> None:
    assert "they add 1 to 2 machine hours; what step gain pays for them follows from prices" in told().output
    prices = PRICES.replace("a2-highgpu-8g", "g2-standard-12") + (
        '[[machines]]\nmachine_type = "n1-highcpu-16"\nregion = "us-central1"\nper_hour = 6.0\n'
    )
    (tmp_path / "prices.toml").write_text(prices)
    text = told("--prices", str(tmp_path / "prices.toml")).output
    assert "pay for themselves when a step becomes more than 1.10x as fast" in text  # 1 + 1 x 6 / (2 x 30)


def test_a_foreign_models_shape_is_asked_of_the_trainer() -> None:
    config = JobConfig(model=ModelConfig(source="penstock_trainer.model.digits:digits_classifier"))
    shape = model_shape(config, vocab_size=0)
    assert shape.decoder is None
    assert shape.num_parameters > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-zero3"], "Did you mean"),
        (["--strategy", "zero9"], "it must be one of ddp"),
        (["--nodes", "0"], "not in the range"),
        (["--tokens-per-second", "-1"], "not in the range"),
    ],
)
def test_wrong_input_ends_with_2(arguments: list[str], message: str) -> None:
    result = told(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_wrong_price_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES.replace("per_hour", "per_our"))
    result = told("--prices", str(path))
    assert result.exit_code == 2
    assert "per_our" in result.output
