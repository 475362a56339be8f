"""Which parts of a model are blocks, and blocks that are computed again."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from penstock_trainer.contract.sections.engine import ActivationCheckpointing
from penstock_trainer.engines.blocks import find_blocks, recompute
from penstock_trainer.errors import EngineError


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return cast("Tensor", x + nn.functional.dropout(self.down(self.up(x).relu()), 0.5))


class Stack(nn.Module):
    def __init__(self, dim: int = 8, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.heads = nn.ModuleList(nn.Linear(dim, 2) for _ in range(2))
        self.head = nn.Linear(dim, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(x))


def test_the_layers_of_a_decoder_are_its_blocks() -> None:
    model = Stack()
    blocks, reason = find_blocks(model)
    assert blocks == list(model.layers)
    assert "layers" in reason


def test_a_class_that_is_named_wins_over_the_largest_list() -> None:
    model = Stack()
    blocks, _ = find_blocks(model, "Embedding")
    assert blocks == [model.embed]


def test_a_model_names_its_own_blocks_as_transformers_models_do() -> None:
    model = Stack()
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    blocks, reason = find_blocks(model)
    assert all(type(block) is nn.Linear for block in blocks)
    assert "Linear" in reason


def test_a_class_that_no_module_has_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(EngineError, match=r"wrap_class = 'Layer' is the class of no module .*Block \(4\)"):
        find_blocks(Stack(), "Layer")


def test_a_model_without_lists_is_cut_by_size() -> None:
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    )
    blocks, reason = find_blocks(model)
    assert "of the parameters" in reason
    counted = [parameter for block in blocks for parameter in block.parameters()]
    assert len(counted) == len({id(parameter) for parameter in counted}), "no parameter is in two blocks"


def test_a_block_that_shares_a_weight_with_the_rest_is_none() -> None:
    model = Stack()
    tied = cast("Block", model.layers[1])
    model.head.weight = nn.Parameter(torch.zeros(50, 8))
    tied.up.weight = model.layers[0].up.weight  # type: ignore[assignment,union-attr]
    blocks, _ = find_blocks(model)
    assert blocks == list(model.layers)[2:]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_block_has_the_same_gradients_names_and_random_numbers(
    mode: ActivationCheckpointing,
) -> None:
    torch.manual_seed(0)
    model = Stack()
    ids = torch.randint(50, (3, 5))
    names = [name for name, _ in model.named_parameters()]

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(ids).square().sum().backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    expected = gradients()
    for layer in model.layers:
        recompute(layer, mode)
        layer.calls = 0  # type: ignore[assignment]
    found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [name for name, _ in model.named_parameters()] == names
    assert [layer.calls for layer in model.layers] == [2] * 4, "once forward and once in backward"
