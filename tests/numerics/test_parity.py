"""Every strategy computes what one process of plain torch computes.

Tolerance of losses: strategies differ from one process in the order of fp32 sums only, which moves a loss near 4.5 by
one or two units in the last place (4.8e-7) a step and was never more than 2e-6 over 50 steps; 5e-6 leaves room for
other processors. The faults that matter (a local norm in clipping, a wrong scale, a label too far) move the third digit.
Tolerance of gradients: an fp32 sum over 192 targets against fp64 is off by 4e-7 of its norm; 1e-5 is 25 times that.
Tolerance of bf16: 8 bits of mantissa move a loss near 4.5 in the third digit after the point.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics.parity_run import VOCAB_SIZE, parity_config, reference, reference_gradients
from penstock_trainer.contract.config import EngineConfig, JobConfig, OptimConfig, Strategy
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.testing import run_ranks

OF_TWO: tuple[Strategy, ...] = ("ddp", "fsdp-full", "zero1", "zero2", "zero3")
STRATEGIES: tuple[Strategy, ...] = (*OF_TWO, "fsdp-hybrid")
STEPS = 10
LOSS_TOLERANCE = 5e-6
GRADIENT_TOLERANCE = 1e-5
BF16_BAND = 5e-3
TIMEOUT_SECONDS = 280.0
FULL_TIMEOUT_SECONDS = 1200.0
"""Of one strategy in the long matrix, whose blocks are compiled anew for most settings."""

# Of the gradients: momentum after one step is the gradient, which clipping and decay must leave alone.
SGD = OptimConfig(name="sgd", momentum=0.9, weight_decay=0.0, clip_norm=1e9, warmup_steps=3)


def engine_of(strategy: Strategy, **more: Any) -> EngineConfig:
    if strategy == "fsdp-hybrid":
        more["shard_size"] = 2
    if strategy == "zero3":  # otherwise all of so small a model stays gathered
        more["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return EngineConfig(strategy=strategy, **more)


def scenario(
    name: str,
    config: JobConfig,
    *,
    steps: int = STEPS,
    start: Path | None = None,
    gradients: Path | None = None,
) -> dict[str, Any]:
    paths = {"start": str(start) if start else None, "gradients": str(gradients) if gradients else None}
    return {"name": name, "config": config.to_json(), "steps": steps, **paths}


def losses_of(
    world_size: int, scenarios: Iterable[dict[str, Any]], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, list[float]]:
    ranks = run_ranks(
        "numerics.parity_ranks",
        [json.dumps(list(scenarios))],
        world_size=world_size,
        timeout_seconds=timeout_seconds,
    )
    assert [rank.returncode for rank in ranks] == [0] * world_size, ranks[0].stderr[-4000:]
    told = [json.loads(line) for line in ranks[0].stdout.splitlines() if line.startswith('{"name"')]
    return {run["name"]: run["losses"] for run in told}


class Runs:
    """A launch of two ranks, and one of four for the strategy that needs groups of ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.losses = losses_of(2, [one for strategy in OF_TWO for one in self._scenarios(strategy)])
        self.losses |= losses_of(4, self._scenarios("fsdp-hybrid"))

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.directory / f"{name}.pt", weights_only=True)
        return found

    def _scenarios(self, strategy: Strategy) -> list[dict[str, Any]]:
        config = parity_config(engine_of(strategy), max_micro_batch=1)
        bf16 = replace(config, engine=engine_of(strategy, precision="bf16"))
        return [
            scenario(f"{strategy} fp32", config),
            scenario(f"{strategy} bf16", bf16, start=self.directory / f"{strategy}-start.pt"),
            scenario(
                f"{strategy} sgd",
                replace(config, optim=SGD),
                steps=1,
                gradients=self.directory / f"{strategy}.pt",
            ),
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"))


def stored_reference() -> list[float]:
    told: list[float] = json.loads(Path(__file__).with_name("reference_losses.json").read_text())["losses"]
    return told


def test_one_process_of_plain_torch_gives_the_stored_curve() -> None:
    losses = reference(parity_config(), STEPS)
    assert losses == pytest.approx(stored_reference()[:STEPS], abs=LOSS_TOLERANCE)
    assert losses[-1] < losses[0] - 0.3, "the run must learn, or equal losses mean little"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_those_of_one_process(runs: Runs, strategy: Strategy) -> None:
    assert runs.losses[f"{strategy} fp32"] == pytest.approx(stored_reference()[:STEPS], abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_in_bf16_stay_in_a_band_around_fp32_and_are_not_fp32(runs: Runs, strategy: Strategy) -> None:
    losses = runs.losses[f"{strategy} bf16"]
    assert losses == pytest.approx(stored_reference()[:STEPS], abs=BF16_BAND)
    assert losses != pytest.approx(stored_reference()[:STEPS], abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masters_in_bf16_begin_as_the_fp32_weights_bit_by_bit(runs: Runs, strategy: Strategy) -> None:
    config = parity_config()
    model = Decoder(config.model, VOCAB_SIZE)
    model.initialize(config.seed)
    found = runs.stored(f"{strategy}-start")
    assert set(found) == set(model.state_dict())
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_fp64(runs: Runs, strategy: Strategy) -> None:
    expected = reference_gradients(parity_config())
    found = runs.stored(strategy)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        error = (found[name].double() - gradient).norm() / gradient.norm()
        assert error < GRADIENT_TOLERANCE, f"{name}: {error}"


def variants(strategy: Strategy) -> Iterable[tuple[str, JobConfig]]:
    for micro in (4, 1):
        for activation in ("none", "selective", "full"):
            for compiled in (False,) if strategy == "zero3" else (False, True):
                engine = engine_of(strategy, activation_checkpointing=activation, compile=compiled)
                name = f"{strategy} micro={micro} {activation} compile={compiled}"
                yield name, parity_config(engine, max_micro_batch=micro)
        chunked = engine_of(strategy, loss_chunk_tokens=40)
        yield f"{strategy} micro={micro} chunked", parity_config(chunked, max_micro_batch=micro)
        if strategy != "ddp":
            offloaded = engine_of(strategy, cpu_offload=True)
            yield f"{strategy} micro={micro} offloaded", parity_config(offloaded, max_micro_batch=micro)


@pytest.mark.full
@pytest.mark.timeout(6 * FULL_TIMEOUT_SECONDS)
def test_all_pairs_of_strategies_and_settings_agree_over_50_steps() -> None:
    curves: dict[str, list[float]] = {"one process": stored_reference()}
    for strategy in STRATEGIES:
        world_size = 4 if strategy == "fsdp-hybrid" else 2
        scenarios = [scenario(name, config, steps=50) for name, config in variants(strategy)]
        curves |= losses_of(world_size, scenarios, timeout_seconds=FULL_TIMEOUT_SECONDS)
    apart = {
        (one, other): max(abs(a - b) for a, b in zip(curves[one], curves[other], strict=True))
        for one in curves
        for other in curves
        if one < other
    }
    worst = max(apart, key=lambda pair: apart[pair])
    assert apart[worst] <= LOSS_TOLERANCE, (worst, apart[worst])
