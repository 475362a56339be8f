"""plan: what a recipe takes, before it is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.settings import FILE_NAME, load_settings
from penstock_pipelines.verbs.options import above_0, at_least_0

if TYPE_CHECKING:
    from penstock_components.planning.goodput import Interruptions
    from penstock_components.planning.prices import Prices
    from penstock_pipelines.plan import Question
    from penstock_pipelines.recipe import Recipe

_WIDTH_OF_A_FILE = 200
"""Columns where no terminal says how many there are."""
_MOST_NODES = 1_000_000


def _rate(text: str) -> tuple[str, float]:
    """RATE, or TYPE=RATE, as a pair of machine and rate; the machine is empty where none is named."""
    machine, equals, rate = text.rpartition("=")
    if equals and not machine:
        raise click.BadParameter(f"{text!r} must be RATE or TYPE=RATE, such as g2-standard-12=1000.")
    return machine, above_0.convert(rate, None, None)


@click.command()
@click.argument("recipe", default="tiny-zero2")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="TYPE",
    help="Machine type; where GPUs are attached to it TYPE:ACCELERATOR:COUNT, such as n1-standard-16:NVIDIA_TESLA_T4:4. "
    "Repeatable. Default: the recipe's.",
)
@click.option(
    "--nodes",
    "node_counts",
    multiple=True,
    type=click.IntRange(min=1, max=_MOST_NODES),
    help="Number of nodes; repeatable. Default: the recipe's.",
)
@click.option("--strategy", "strategies", multiple=True, help="Engine strategy; repeatable. Default: all.")
@click.option("--location", help="Region, for prices. Default: that of penstock.toml, if there is one.")
@click.option("--tokens", type=above_0, help="To train on. Default: the recipe's steps.")
@click.option(
    "--tokens-per-second",
    type=_rate,
    multiple=True,
    metavar="RATE|TYPE=RATE",
    help="Of one accelerator, measured with this model. Of several machines each has its own: TYPE=RATE, repeatable, with "
    "TYPE as in --machine.",
)
@click.option(
    "--prices",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your price file: docs/prices.md.",
)
@click.option(
    "--node-mtbf-hours",
    type=above_0,
    help="Mean time between two losses of one machine, as you have seen it.",
)
@click.option(
    "--restart-seconds",
    type=above_0,
    default=600.0,
    show_default=True,
    help="From a loss to the first new step.",
)
@click.option(
    "--save-stall-seconds",
    type=above_0,
    default=5.0,
    show_default=True,
    help="How long a save stops training.",
)
@click.option(
    "--reserved-gb",
    type=at_least_0,
    default=2.0,
    show_default=True,
    help="Of each accelerator, left for its driver and NCCL. What a rank may hold is the memory in the accelerator's name, "
    "40 GB of an A100, less this; GB are decimal, 10^9 bytes.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def plan(
    settings_file: Path | None,
    recipe: str,
    machines: tuple[str, ...],
    node_counts: tuple[int, ...],
    strategies: tuple[str, ...],
    location: str | None,
    tokens: float | None,
    tokens_per_second: tuple[tuple[str, float], ...],
    prices: Path | None,
    node_mtbf_hours: float | None,
    restart_seconds: float,
    save_stall_seconds: float,
    reserved_gb: float,
    as_json: bool,
) -> None:
    """Say what RECIPE takes on each machine, number of nodes and engine: memory, traffic, hours, cost, interruptions.

    Memory and traffic are computed. Hours follow from a rate that you give, cost from your price file, interruptions from
    a rate that you have seen; what is not given is said to be missing.
    """
    from penstock_components.jobs.findings import JobSpecError
    from penstock_components.machines.catalogue import MachineError
    from penstock_pipelines.plan import STRATEGIES, Question
    from penstock_pipelines.recipes import UnknownRecipeError, find_recipe
    from penstock_trainer.contract.fields import ContractError

    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise InputError(f"there is no strategy {unknown[0]!r}; it must be one of {', '.join(STRATEGIES)}.")
    try:
        found = find_recipe(recipe)
    except UnknownRecipeError as exc:
        raise InputError(str(exc)) from exc
    question = Question(
        machines=machines,
        node_counts=node_counts,
        strategies=tuple(name for name in STRATEGIES if name in strategies) or STRATEGIES,
        location=location or _location(settings_file),
        tokens=tokens,
        tokens_per_second=tokens_per_second,
        prices=_prices(prices),
        price_file=str(prices),
        interruptions=_interruptions(node_mtbf_hours, restart_seconds, save_stall_seconds),
        reserved_gb=reserved_gb,
    )
    try:
        _answer(found, question, as_json=as_json)
    except (JobSpecError, MachineError, ContractError) as exc:
        raise InputError(str(exc)) from exc


def _answer(recipe: Recipe, question: Question, *, as_json: bool) -> None:
    from penstock_pipelines.plan import plan as answer

    made = answer(recipe, question)
    if as_json:
        click.echo(made.to_json())
        return
    from rich.console import Console

    from penstock_pipelines.plan_tables import print_plan

    console = Console()
    print_plan(console if console.is_terminal else Console(width=_WIDTH_OF_A_FILE), made)


def _location(settings_file: Path | None) -> str:
    has_settings = settings_file is not None or Path(FILE_NAME).exists()
    return load_settings(settings_file).location if has_settings else ""


def _prices(path: Path | None) -> Prices | None:
    from penstock_components.planning.prices import PriceError, load_prices

    try:
        return load_prices(path) if path is not None else None
    except PriceError as exc:
        raise InputError(str(exc)) from exc


def _interruptions(
    node_mtbf_hours: float | None, restart_seconds: float, save_stall_seconds: float
) -> Interruptions | None:
    from penstock_components.planning.goodput import Interruptions

    if node_mtbf_hours is None:
        return None
    return Interruptions(
        node_mtbf_hours=node_mtbf_hours,
        restart_seconds=restart_seconds,
        save_stall_seconds=save_stall_seconds,
    )
