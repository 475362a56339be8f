"""The schedule's values and what the optimizer is made of."""

from __future__ import annotations

import pytest
import torch

from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import OptimConfig
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.optim import build_adamw, learning_rate, materialize_state


def test_the_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)  # half-way down: the mean of peak and minimum
    assert rates[11] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_without_warm_up_the_first_step_is_on_the_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, min_lr_ratio=0.0, warmup_steps=0)
    assert learning_rate(config, 0, 2) == pytest.approx(0.5)
    assert learning_rate(config, 1, 2) == pytest.approx(0.0)


def test_weight_decay_is_for_matrices_only() -> None:
    model = Decoder(tiny_config("").model, 50)
    decayed, kept = build_adamw(model.parameters(), OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in kept["params"]} == {1}
    assert len(kept["params"]) == 2 * 2 + 1


def test_materialized_state_steps_as_state_that_adamw_makes_itself() -> None:
    def stepped(*, materialized: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        optimizer = build_adamw([weight], OptimConfig())
        if materialized:
            materialize_state(optimizer)
        for scale in (1.0, -0.5):
            weight.grad = torch.full_like(weight, scale)
            optimizer.step()
        return weight.detach()

    assert torch.equal(stepped(materialized=True), stepped(materialized=False))
