"""The seeds' memory of ARR-COC beside the planner's: the table of docs/seeds.md."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from penstock_components.planning.placement import Placement
from penstock_components.planning.shape import ModelShape, Parameter
from penstock_components.planning.states import Held, model_states
from penstock_trainer.contract.config import EngineConfig, JobConfig, Strategy

PAGE = Path(__file__).parents[4] / "docs" / "seeds.md"
SIDE = 10_000
"""Of the square matrices of which the seeds' round numbers are made here; their shapes are nowhere told."""


def arr_coc(*, trains_base: bool = True) -> ModelShape:
    """2 B parameters of the base, three scorers of 100 M and an adapter of 50 M."""
    base = [
        Parameter(name=f"base.{layer}.weight", shape=(SIDE, SIDE), block=layer, is_trained=trains_base)
        for layer in range(20)
    ]
    scorers = [Parameter(name=f"scorers.{scorer}.weight", shape=(SIDE, SIDE)) for scorer in range(3)]
    adapter = Parameter(name="adapter.weight", shape=(SIDE // 2, SIDE))
    return ModelShape(parameters=(*base, *scorers, adapter))


def states(strategy: Strategy, *, ranks: int, shape: ModelShape) -> Held:
    config = JobConfig(engine=EngineConfig(strategy=strategy, precision="bf16"), global_batch=32)
    return model_states(
        Placement(config=config, shape=shape, world_size=ranks, ranks_per_node=min(ranks, 8))
    ).device


def gigabytes(held: Held) -> tuple[float, ...]:
    """Parameters, masters, gradients, optimizer; step counts and padding round away."""
    return tuple(round(size / 1e9, 2) for size in astuple(held)[:4])


def test_the_model_is_that_of_the_seeds() -> None:
    assert arr_coc().num_parameters == 2_350_000_000


@pytest.mark.parametrize(
    ("strategy", "ranks", "parts", "together"),
    [
        ("ddp", 1, (9.4, 0.0, 9.4, 18.8), "37.6 GB"),
        ("zero2", 8, (4.7, 1.18, 1.18, 2.35), "9.4 GB"),
        ("zero3", 8, (0.59, 1.18, 1.18, 2.35), "5.4 GB"),
        ("fsdp-full", 8, (1.18, 0.0, 1.18, 2.35), "4.7 GB"),
        ("zero2", 32, (4.7, 0.29, 0.29, 0.59), "5.9 GB"),
    ],
)
def test_the_planner_counts_what_the_page_says(
    strategy: Strategy, ranks: int, parts: tuple[float, ...], together: str
) -> None:
    held = states(strategy, ranks=ranks, shape=arr_coc())
    assert gigabytes(held) == parts
    assert f"{held.total / 1e9:.1f} GB" == together
    row = next(
        line for line in PAGE.read_text().splitlines() if line.startswith(f"| {strategy}, {ranks} GPU")
    )
    assert f"**{together}**" in row
    assert [f"{part:.2f}" for part in parts] == [cell.strip() for cell in row.split("|")[2:6]]


def test_a_frozen_base_leaves_states_of_the_small_modules_alone() -> None:
    held = states("zero2", ranks=8, shape=arr_coc(trains_base=False))
    assert f"{held.total / 1e9:.1f} GB" == "5.4 GB"
    assert "zero2 on 8 GPUs then holds 5.4 GB" in PAGE.read_text().replace("\n", " ")
