"""`penstock plan`: what it computes, what follows from what is given, and what it says of what is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from compiled import ROOT
from penstock_components.jobs.messages import ContainerSpec, MachineSpec
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.resources import Resources
from penstock_components.jobs.roles import Evaluators
from penstock_components.planning.goodput import Interruptions
from penstock_components.planning.prices import parse_prices
from penstock_pipelines.cli import main
from penstock_pipelines.errors import InputError
from penstock_pipelines.plan import Plan, Question, model_shape, plan
from penstock_pipelines.plan_tables import print_plan
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
REDUCER_PRICE = """
[[machines]]
machine_type = "n1-highcpu-16"
region = "us-central1"
per_hour = 6.0
"""


def told(*arguments: str) -> Result:
    settings = ["--settings", str(ROOT / "penstock.toml")]
    return CliRunner().invoke(main, [*settings, "plan", *arguments], catch_exceptions=False)


def options(*arguments: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    made = json.loads(told("tiny-zero2", "--json", *arguments).output)["options"]
    return {(each["machine_type"], each["num_nodes"], each["strategy"]): each for each in made}


def text_of(made: Plan) -> str:
    written = StringIO()
    print_plan(Console(file=written, width=250), made)
    return written.getvalue()


def test_each_combination_is_there_with_its_reason_where_it_cannot_be() -> None:
    machines = ["--machine", "a2-highgpu-8g", "--machine", "n1-highcpu-16", "--machine", "ct5lp-hightpu-4t"]
    found = options(*machines, "--nodes", "2", "--nodes", "3")
    assert len(found) == 3 * 2 * 6
    assert found["a2-highgpu-8g", 2, "zero2"]["feasible"]
    assert "multiple of the 24 ranks" in found["a2-highgpu-8g", 3, "zero2"]["reason"]
    assert "no GPU" in found["n1-highcpu-16", 2, "ddp"]["reason"]
    assert "no GPU" in found["ct5lp-hightpu-4t", 2, "ddp"]["reason"]
    assert found["n1-highcpu-16", 2, "ddp"]["hours"] is None


def test_engines_that_cannot_be_for_one_reason_are_told_together() -> None:
    text = told("--machine", "n1-highcpu-16").output
    assert text.count("it has no GPU") == 1
    assert "2 x n1-highcpu-16 ddp, fsdp-full, fsdp-hybrid, zero1, zero2, zero3: it has no GPU" in text


def test_gpus_are_attached_to_a_machine_by_its_name() -> None:
    name = "n1-standard-16:NVIDIA_TESLA_T4:4"
    found = options("--machine", name, "--strategy", "zero2", "--tokens-per-second", f"{name}=1000")
    of_it = found["n1-standard-16", 2, "zero2"]
    assert (of_it["accelerator_type"], of_it["accelerator_count"]) == ("NVIDIA_TESLA_T4", 4)
    assert of_it["world_size"] == 8
    assert of_it["memory_limit_bytes"] == 14e9
    assert of_it["hours"] is not None
    assert "n1-standard-16:ACCELERATOR:COUNT" in told("--machine", "n1-standard-16").output


def test_the_recipes_own_gpus_are_meant_by_its_machine_type() -> None:
    own = MachineSpec(
        machine_type="n1-standard-16", accelerator_type="NVIDIA_TESLA_V100", accelerator_count=2
    )
    recipe = replace(find_recipe("tiny-fsdp"), resources=Resources(machine=own, num_nodes=2))
    made = plan(recipe, Question(machines=("n1-standard-16",), tokens_per_second=(("n1-standard-16", 1e3),)))
    assert {each.machine for each in made.options} == {own}
    assert made.rates == {"n1-standard-16:NVIDIA_TESLA_V100:2": 1e3}


def test_accelerators_that_go_without_saying_may_be_said() -> None:
    found = options(
        "--machine", "a2-highgpu-8g:NVIDIA_TESLA_A100:8", "--machine", "a2-highgpu-8g", "--nodes", "2"
    )
    assert len(json.loads(told("--json", "--machine", "a2-highgpu-8g").output)["options"]) == 6
    assert {machine for machine, _, _ in found} == {"a2-highgpu-8g"}


def test_a_part_of_a_gpu_is_not_taken_for_a_whole_one() -> None:
    part = MachineSpec(
        machine_type="a2-highgpu-1g",
        accelerator_type="NVIDIA_TESLA_A100",
        accelerator_count=1,
        gpu_partition_size="1g.5gb",
    )
    recipe = replace(find_recipe("tiny-fsdp"), resources=Resources(machine=part))
    assert all("a part of a GPU, 1g.5gb" in each.reason for each in plan(recipe, Question()).options)


@pytest.mark.parametrize("machine", ["a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g"])
@pytest.mark.parametrize("server", [None, ReductionServer(replica_count=2)])
def test_machines_whose_network_a_script_sets_up_are_planned(
    machine: str, server: ReductionServer | None
) -> None:
    resources = Resources(machine=machine, num_nodes=2, reduction_server=server)
    made = plan(replace(find_recipe("tiny-fsdp"), resources=resources), Question())
    assert made.own is not None
    assert made.own.is_feasible
    assert ("reducers of" in text_of(made)) is (server is not None)


def test_a_location_of_no_region_needs_no_image_of_reducers() -> None:
    result = told("tiny-zero2", "--location", "moon-1")
    assert result.exit_code == 0
    assert "reducers of 2 x g2-standard-12 zero2: at 2 nodes" in result.output


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


def test_no_progress_is_said_where_losses_leave_none() -> None:
    given = ["--strategy", "ddp", "--tokens-per-second", "1000", "--node-mtbf-hours", "0.1"]
    (cost,) = options(*given, "--restart-seconds", "6000").values()
    assert (cost["goodput"], cost["hours"], cost["no_hours"]) == (
        0,
        None,
        "no progress at this rate of losses",
    )
    assert "no progress at this rate of losses" in told(*given, "--restart-seconds", "6000").output


def test_each_machine_has_a_rate_of_its_own() -> None:
    machines = [
        "--machine",
        "a2-highgpu-8g",
        "--machine",
        "g2-standard-12",
        "--strategy",
        "ddp",
        "--nodes",
        "1",
    ]
    rates = ["--tokens-per-second", "a2-highgpu-8g=4000", "--tokens-per-second", "g2-standard-12=1000"]
    found = options(*machines, *rates)
    slow, fast = found["g2-standard-12", 1, "ddp"]["hours"], found["a2-highgpu-8g", 1, "ddp"]["hours"]
    assert slow == pytest.approx(32 * fast)  # 4 times the rate, 8 accelerators
    one = options(*machines, *rates[:2])
    assert one["g2-standard-12", 1, "ddp"]["no_hours"] == (
        "not known for g2-standard-12; give --tokens-per-second g2-standard-12=RATE"
    )
    both = told(*machines, *rates, "--strategy", "zero2").output
    assert "a machine's rate is taken for each number of nodes and engine" in both


def test_what_was_not_given_is_said_to_be_missing(tmp_path: Path) -> None:
    text = told("tiny-zero2").output
    assert "hours: not known; give --tokens-per-second" in text
    assert "cost: not known; give --prices" in text
    (tmp_path / "prices.toml").write_text(PRICES.replace("a2-highgpu-8g", "g2-standard-12"))
    priced = told("tiny-fsdp", "--prices", str(tmp_path / "prices.toml")).output
    assert "cost: not known; it follows from hours" in priced


@pytest.mark.parametrize(
    ("location", "missing"),
    [("us-central1", "n1-highcpu-16"), ("europe-west4", "g2-standard-12 and n1-highcpu-16")],
)
def test_a_price_that_the_file_does_not_have_is_named_once(
    tmp_path: Path, location: str, missing: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES.replace("a2-highgpu-8g", "g2-standard-12"))
    given = ["--prices", str(path), "--location", location, "--tokens-per-second", "1000"]
    reason = f"no price of {missing} in {location} (STANDARD) in {path}"
    text = told("tiny-zero2", *given).output
    assert text.count(reason) == 1
    assert re.search(r"hours +EUR", text)
    found = options(*given)
    assert {each["no_price"] for each in found.values()} == {reason}
    assert {each["price"] for each in found.values()} == {None}


def test_without_a_region_no_price_is_looked_up() -> None:
    made = plan(find_recipe("tiny-fsdp"), Question(prices=parse_prices(PRICES, name="prices")))
    assert "a price is of a region: give --location" in text_of(made)


def test_what_stands_beside_the_nodes_is_paid_for() -> None:
    evaluator = Evaluators(machine=MachineSpec(machine_type="n1-highcpu-16"), container=ContainerSpec())
    recipe = find_recipe("tiny-fsdp")
    recipe = replace(
        recipe, resources=replace(recipe.resources, machine="a2-highgpu-8g", evaluators=evaluator)
    )
    question = Question(
        prices=parse_prices(PRICES + REDUCER_PRICE, name="prices"),
        location="us-central1",
        tokens=57_600_000,
        tokens_per_second=(("", 1000.0),),
        strategies=("ddp",),
    )
    made = plan(recipe, question)
    cost = made.costs(made.options[0])
    assert cost.hours == pytest.approx(1.0)  # 57.6e6 tokens over 16 accelerators of 1,000 a second
    assert cost.price == pytest.approx(2 * 30.0 + 6.0)
    assert "cost: 2 x a2-highgpu-8g with 1 x n1-highcpu-16 beside them" in text_of(made)


def test_the_traffic_that_reducers_help_with_is_told_apart() -> None:
    assert "in all-reduce" in told("tiny-zero2", "--strategy", "zero2").output
    assert "in all-reduce" not in told("tiny-zero2", "--strategy", "zero3").output


def traffic_rows(text: str) -> set[tuple[str, str]]:
    """Machines and engine of the rows of the table of traffic."""
    return set(re.findall(r"^(\d+ x \S+) +(\S+) +(?:all_|reduce_scatter)", text, re.MULTILINE))


def test_what_each_of_a_few_options_sends_is_shown() -> None:
    assert len(traffic_rows(told("tiny-zero2").output)) == 6
    assert traffic_rows(told("tiny-zero2", "--strategy", "zero3").output) == {("2 x g2-standard-12", "zero3")}
    alone = told("tiny-zero2", "--strategy", "ddp", "--nodes", "1").output
    assert "traffic: a step of 1 x g2-standard-12 ddp sends nothing" in alone


def test_of_many_options_the_recipes_own_traffic_is_shown_and_where_the_rest_is() -> None:
    many = told("tiny-zero2", "--nodes", "4", "--nodes", "2").output
    assert traffic_rows(many) == {("2 x g2-standard-12", "zero2")}
    assert "traffic: that of 11 more options is in --json" in many
    others = told("tiny-zero2", "--nodes", "4", "--nodes", "8").output
    assert traffic_rows(others) == {("4 x g2-standard-12", "ddp")}


def test_reducers_are_weighed_against_what_they_cost(tmp_path: Path) -> None:
    hours = "1 reducer beside 2 nodes: 1 machine hour more for each 2 that the nodes take"
    assert f"{hours}; what step gain pays for that follows from prices" in told().output
    (tmp_path / "prices.toml").write_text(PRICES.replace("a2-highgpu-8g", "g2-standard-12") + REDUCER_PRICE)
    text = told("--prices", str(tmp_path / "prices.toml")).output
    least = "which pays for itself when a step becomes more than 1.10x as fast"  # 1 + 1 x 6 / (2 x 30)
    assert f"{hours}, {least}" in text


@pytest.mark.parametrize("asked", [["--machine", "a3-highgpu-8g"], ["--nodes", "4"], ["--strategy", "zero3"]])
def test_reducers_are_spoken_of_only_where_the_recipes_own_option_is(asked: list[str]) -> None:
    assert "reducers" not in told("tiny-zero2", *asked).output


def test_reducers_of_one_node_are_said_to_need_two() -> None:
    recipe = find_recipe("tiny-zero2")
    alone = replace(recipe, resources=replace(recipe.resources, num_nodes=1))
    text = text_of(plan(alone, Question()))
    assert "reducers of 1 x g2-standard-12 zero2: they need at least 2 nodes" in text


def test_what_compile_changes_is_said_not_to_be_counted() -> None:
    recipe = find_recipe("tiny-fsdp")
    line = "memory: what engine.compile changes is not counted"
    assert line not in text_of(plan(recipe, Question()))
    engine = replace(recipe.config.engine, compile=True)
    compiled = replace(recipe, config=replace(recipe.config, engine=engine))
    question = Question(strategies=("ddp", "fsdp-full"))
    assert text_of(plan(compiled, question)).count(line) == 1


def test_grouped_heads_without_a_fused_kernel_are_said_not_to_be_counted() -> None:
    recipe = find_recipe("tiny-fsdp")
    assert "the scores of attention are not counted" in text_of(plan(recipe, Question()))
    narrow = replace(
        recipe, config=replace(recipe.config, engine=replace(recipe.config.engine, precision="bf16"))
    )
    assert "the scores of attention" not in text_of(plan(narrow, Question()))


def test_an_accelerator_that_is_set_aside_whole_holds_nothing() -> None:
    (found,) = options("--strategy", "zero2", "--reserved-gb", "24").values()
    assert found["reason"] == "24 GB set aside leave nothing of its 24 GB"


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
        (["--tokens-per-second", "=1000"], "must be RATE or TYPE=RATE"),
        (["--tokens-per-second", "nan"], "must be a finite number"),
        (["--tokens-per-second", "g2-standard-12=inf"], "must be a finite number"),
        (["--tokens-per-second", "1", "--tokens-per-second", "2"], "given twice for g2-standard-12"),
        (["--tokens-per-second", "a2-highgpu-1g=1"], "planned: g2-standard-12"),
        (["--node-mtbf-hours", "nan"], "must be a finite number"),
        (["--node-mtbf-hours", "1e-300"], "must be a finite number"),
        (["--reserved-gb", "nan"], "must be a finite number"),
        (["--reserved-gb", "inf"], "must be a finite number"),
        (["--tokens", "inf"], "must be a finite number"),
        (["--machine", "a2-highgpu-8"], "Did you mean a2-highgpu-8g"),
        (["--machine", "n1-standard-16:NVIDIA_TESLA_T4"], "must be TYPE or TYPE:ACCELERATOR:COUNT"),
        (["--machine", "n1-standard-16:NVIDIA_TESLA_T4:3"], "does not carry 3 x NVIDIA_TESLA_T4"),
    ],
)
def test_wrong_input_ends_with_2(arguments: list[str], message: str) -> None:
    result = told(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_one_rate_is_not_taken_for_several_machines() -> None:
    question = Question(machines=("a2-highgpu-8g", "g2-standard-12"), tokens_per_second=(("", 1000.0),))
    with pytest.raises(InputError, match="--tokens-per-second a2-highgpu-8g=RATE --tokens-per-second g2-"):
        plan(find_recipe("tiny-zero2"), question)


def test_an_unknown_machine_is_told_once() -> None:
    assert told("--machine", "a2-highgpu-8").output.count("is not a machine type") == 1


def test_a_wrong_price_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES.replace("per_hour", "per_our"))
    result = told("--prices", str(path))
    assert result.exit_code == 2
    assert "per_our" in result.output
