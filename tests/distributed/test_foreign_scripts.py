"""Scripts that nobody here adapted, under our launcher on two nodes of two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from distributed.foreign.accelerate_regression import points
from penstock_trainer.testing import run_cluster

SCRIPT = Path(__file__).parent / "foreign/accelerate_regression.py"
WORLD_SIZE = 4
EPOCHS = 2
# Of 4 samples on each of 4 ranks, which Accelerate deals out batch by batch.
GLOBAL_BATCH = 16
# What `accelerate config` writes for a machine without accelerators, where Accelerate otherwise takes every process for
# a run of its own, under torchrun too.
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def plain_weights(epochs: int) -> list[float]:
    """The same training in one process, on whole batches, from what rank 0 begins with."""
    inputs, targets = points().tensors
    model = torch.nn.Linear(8, 1)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for x, y in zip(inputs.split(GLOBAL_BATCH), targets.split(GLOBAL_BATCH), strict=True):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def test_an_accelerate_script_gets_the_right_ranks_and_reduces_its_gradients(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "penstock_trainer", "launch", "--processes-per-node=2", "--"),
        *("python", str(SCRIPT), "--output", str(tmp_path), "--epochs", str(EPOCHS)),
    ]
    nodes = run_cluster([command] * 2, reducers=1, env=ON_CPU, timeout_seconds=120.0)

    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    told: list[dict[str, Any]] = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)
    ]
    assert [(rank["rank"], rank["world_size"], rank["local_rank"]) for rank in told] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 1),
    ]
    steps = EPOCHS * len(points()) // GLOBAL_BATCH
    assert {rank["steps"] for rank in told} == {steps}
    # Accelerate prints on local rank 0 of each node; the launcher names the ranks that are not 0.
    for node, prefix in zip(nodes, ("", "[rank 2] "), strict=True):
        lines = [line for line in node.stdout.splitlines() if "step" in line]
        assert lines == [f"{prefix}step {step}" for step in range(1, steps + 1)]

    assert all(rank["weights"] == told[0]["weights"] for rank in told)
    # Means of four means against one mean, in fp32, of weights up to 8.
    assert told[0]["weights"] == pytest.approx(plain_weights(EPOCHS), abs=1e-5)
