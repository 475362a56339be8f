"""The chunked loss of a linear head against torch's cross entropy of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock_trainer.model.linear_loss import linear_cross_entropy

TOKENS, DIM, VOCAB, IGNORED = 37, 16, 101, -100


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::5] = IGNORED
    labels[16:24] = IGNORED  # all of a chunk of 8
    return hidden, weight, labels


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 8) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, chunk=chunk)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight).float(), labels, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_loss_and_gradients_are_those_of_all_logits(chunk: int) -> None:
    hidden, weight, labels = inputs()
    loss, expected = chunked(hidden, weight, labels, chunk), whole(hidden, weight, labels)
    # fp32, the order of sums differs.
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-6)
    scale = 0.25  # as a caller divides by the number of targets
    gradients = torch.autograd.grad(loss * scale, (hidden, weight))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected * scale, (hidden, weight)), atol=1e-5, rtol=1e-5
    )
    assert (gradients[0][labels == IGNORED] == 0).all()


def test_gradients_are_the_slopes_of_the_loss() -> None:
    hidden, weight, labels = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: chunked(h, w, labels), (hidden, weight))


def test_only_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels = inputs()
    (gradient,) = torch.autograd.grad(chunked(hidden, weight.detach(), labels), hidden)
    (expected,) = torch.autograd.grad(whole(hidden, weight.detach(), labels), hidden)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), LargestOutput() as largest:
        loss = chunked(hidden, weight, labels)
    assert not loss.requires_grad
    assert largest.shapes.isdisjoint({weight.shape, hidden.shape})


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_bf16_and_gradients_have_the_types_of_the_weights(
    hidden_dtype: torch.dtype,
) -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(whole(hidden, weight, labels), (hidden, weight))
    given = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), LargestOutput() as largest:
        loss = chunked(given, weight, labels)
    assert (torch.bfloat16, (8, VOCAB)) in largest.outputs
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (given, weight))
    assert [gradient.dtype for gradient in gradients] == [hidden_dtype, torch.float32]
    # bf16 has 8 bits of mantissa: logits of size 10 are wrong by up to 0.03, and so are probabilities.
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.float(), reference, atol=0.2, rtol=0.05)


def test_of_bf16_inputs_the_loss_is_fp32_and_the_weights_gradient_is_summed_in_fp32() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    hidden = hidden.detach().repeat(40, 1).requires_grad_()
    labels = labels.repeat(40)
    loss = chunked(hidden, weight, labels)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
    exact = torch.autograd.grad(whole(hidden.float(), weight.float(), labels), weight)[0]
    in_bf16 = torch.zeros_like(weight)
    for start in range(0, len(hidden), 8):
        part = slice(start, start + 8)
        in_bf16 += torch.autograd.grad(whole(hidden[part], weight, labels[part]), weight)[0]
    # 185 chunks: a sum of them in bf16 loses what is small beside the sum so far.
    assert (gradients[1] - exact).norm() < 0.5 * (in_bf16 - exact).norm()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1 / 3), (torch.float16, 70_000.0)])
def test_the_scale_of_the_gradients_is_not_rounded(dtype: torch.dtype, scale: float) -> None:
    """To bf16, a third is wrong by 0.2 %; to fp16, 70 000 is infinite."""
    hidden, weight, labels = inputs(dtype)
    plain = torch.autograd.grad(chunked(hidden, weight, labels), (hidden, weight))
    scaled = torch.autograd.grad(chunked(hidden, weight, labels) * scale, (hidden, weight))
    for before, after in zip(plain, scaled, strict=True):
        expected = before.float() * scale
        fits = (before.abs() > 1e-3) & (expected.abs() < torch.finfo(dtype).max)
        growth = (after.float() / expected)[fits]
        # Elements are rounded by up to half an eps, up or down; their mean over hundreds is not.
        assert growth.numel() > 100
        assert growth.mean().item() == pytest.approx(1, abs=0.05 * torch.finfo(dtype).eps)


def test_no_tensor_is_larger_than_a_chunks_logits() -> None:
    tokens, chunk = 256, DIM
    hidden = torch.randn(tokens, DIM, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, requires_grad=True)
    labels = torch.randint(VOCAB, (tokens,))
    saved: list[int] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x),
        LargestOutput() as largest,
    ):
        chunked(hidden, weight, labels, chunk).backward()
    assert max(numel for numel in largest.sizes) == max(chunk * VOCAB, tokens * DIM)
    assert sorted(saved) == sorted([tokens * DIM, VOCAB * DIM])


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk = 0 tokens is not valid: it must be at least 1"):
        chunked(*inputs(), chunk=0)


class LargestOutput(TorchDispatchMode):
    """Records type and shape of what every operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: set[tuple[torch.dtype, tuple[int, ...]]] = set()

    @property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for _, shape in self.outputs]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        return {shape for _, shape in self.outputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.outputs.add((leaf.dtype, tuple(leaf.shape)))
        return result
