"""A layer of the built-in decoder as the operations that autograd runs: what each makes, keeps and needs meanwhile.

Sizes are bytes for one micro-batch. They follow penstock_trainer.model.decoder and what torch 2.13's operations save for
backward; the sum over a layer is the count of Korthikanti et al. (arXiv:2205.05198, section 4.1) for another layer: there
34 N D bytes for 16-bit GPT layers with dropout and two norms, here SwiGLU, RMSNorm, rotary positions and grouped heads.
Attention is by a kernel that keeps no scores (flash, efficient, cuDNN; on CPU torch's flash kernel), so nothing grows with
the square of the length.

Two devices differ. CUDA has a fused RMSNorm that keeps its input and a scale for each token; on CPU torch composes it, in
fp32, and keeps the normalised values too. CUDA's flash kernel writes what the output projection reads; on CPU that is a
copy. The CPU's are compared with counted tensors in tests/distributed/test_planner.py; CUDA's follow torch's source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock_components.planning.placement import FP32, Placement
from penstock_trainer.contract.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a layer, with its tensors by name."""

    inputs: tuple[str, ...]
    output: str
    size: int
    """Of the output; 0: it is another view of the first input."""
    saved: tuple[str, ...] = ()
    """Inputs and outputs that backward reads."""
    extra: int = 0
    """Of what is kept for backward besides them."""
    work: int = 0
    """Of what only forward needs while it runs."""
    backward_work: int = 0
    """Of what only backward needs while it runs, besides the gradients of the inputs."""
    weights: tuple[str, ...] = ()
    """Names of parameters, within the layer, that get a gradient."""
    is_costly: bool = False
    """Whether selective checkpointing keeps the output rather than compute it again."""
    is_sum: bool = False
    """Whether the gradient of the output is that of each input, the same tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of the tensors of one micro-batch."""

    tokens: int
    length: int
    """Tokens of a sample."""
    residual_item: int
    """Bytes of an element of the residual stream: fp32 under DDP's autocast, else the compute type."""
    item: int
    """Of an element elsewhere."""
    is_cpu: bool

    @classmethod
    def of(cls, at: Placement) -> Sizes:
        """Of a placement's micro-batch."""
        is_autocast = at.engine.strategy == "ddp" and at.is_narrow
        return cls(
            tokens=at.micro_batch * at.config.data.seq_len,
            length=at.config.data.seq_len,
            residual_item=FP32 if is_autocast else at.item_bytes,
            item=at.item_bytes,
            is_cpu=at.device == "cpu",
        )


def layer_operations(model: ModelConfig, sizes: Sizes) -> list[Operation]:
    """In the order of forward; from `x` to `x_out`."""
    return [*_attention(model, sizes), *_feed_forward(model, sizes)]


def norm(source: str, output: str, weight: str, *, dim: int, count: int, sizes: Sizes) -> Operation:
    """RMSNorm of `count` vectors of `dim` elements for each token."""
    numel = sizes.tokens * count * dim
    scale = FP32 * sizes.tokens * count
    item = sizes.residual_item if count == 1 else sizes.item
    if not sizes.is_cpu:
        return Operation(
            inputs=(source,),
            output=output,
            size=numel * item,
            saved=(source,),
            extra=scale,
            weights=(weight,),
        )
    widened = 0 if item == FP32 else FP32 * numel
    return Operation(
        inputs=(source,),
        output=output,
        size=numel * item,
        saved=(source,),
        extra=widened + numel * item + scale,
        work=FP32 * numel,
        backward_work=(3 if widened else 2) * FP32 * numel,
        weights=(weight,),
    )


def _attention(model: ModelConfig, sizes: Sizes) -> Iterator[Operation]:
    q_dim, kv_dim = model.num_heads * model.dims_per_head, model.num_kv_heads * model.dims_per_head
    q_size, kv_size = sizes.tokens * q_dim * sizes.item, sizes.tokens * kv_dim * sizes.item
    yield norm("x", "h", "input_layernorm.weight", dim=model.dim, count=1, sizes=sizes)
    cast, has_bias = _cast(model, sizes), model.family == "qwen2"
    yield _linear("h", "q0", q_size, "self_attn.q_proj", cast=cast, has_bias=has_bias)
    yield _linear("h", "k0", kv_size, "self_attn.k_proj", cast=cast, has_bias=has_bias)
    q, k = "q0", "k0"
    if model.family == "qwen3":
        heads = {"dim": model.dims_per_head, "sizes": sizes}
        yield norm(q, "q1", "self_attn.q_norm.weight", count=model.num_heads, **heads)  # type: ignore[arg-type]
        yield norm(k, "k1", "self_attn.k_norm.weight", count=model.num_kv_heads, **heads)  # type: ignore[arg-type]
        q, k = "q1", "k1"
    yield _turned(q, "q", q_size, sizes)
    yield _turned(k, "k", kv_size, sizes)
    yield _linear("h", "v", kv_size, "self_attn.v_proj", cast=cast, has_bias=has_bias)
    yield Operation(
        inputs=("q", "k", "v"),
        output="y",
        size=q_size,
        saved=("q", "k", "v", "y"),
        extra=FP32 * sizes.tokens * model.num_heads + _mask(model, sizes),  # logsumexp of each query
        backward_work=0 if sizes.is_cpu else _flash_backward(model, sizes),
        is_costly=True,
    )
    yield Operation(inputs=("y",), output="merged", size=q_size if sizes.is_cpu else 0, is_sum=True)
    residual = sizes.tokens * model.dim
    yield _linear("merged", "a", residual * sizes.item, "self_attn.o_proj")
    yield from _dropout("a", model, sizes)
    yield Operation(
        inputs=("x", "a_left" if model.dropout else "a"),
        output="x_mid",
        size=residual * sizes.residual_item,
        is_sum=True,
    )


def _dropout(source: str, model: ModelConfig, sizes: Sizes) -> Iterator[Operation]:
    """It keeps its mask: a byte an element on CUDA, of the input's type on CPU."""
    if model.dropout:
        numel = sizes.tokens * model.dim
        mask = numel * (sizes.item if sizes.is_cpu else 1)
        yield Operation(inputs=(source,), output=f"{source}_left", size=numel * sizes.item, extra=mask)


def _mask(model: ModelConfig, sizes: Sizes) -> int:
    """Bytes of the window's mask as each layer's attention keeps it; without a window there is none."""
    windowed = model.sliding_window is not None and sizes.length > model.sliding_window
    return sizes.length**2 * sizes.item if windowed else 0


def _flash_backward(model: ModelConfig, sizes: Sizes) -> int:
    """fp32 sums of the queries' gradient, a scalar for each query, and with grouped heads the keys' and values' gradients
    of every query head (mha_bwd of flash-attention 2)."""
    q_numel = sizes.tokens * model.num_heads * model.dims_per_head
    expanded = 2 * q_numel * sizes.item if model.num_kv_heads < model.num_heads else 0
    return FP32 * q_numel + FP32 * sizes.tokens * model.num_heads + expanded


def _feed_forward(model: ModelConfig, sizes: Sizes) -> Iterator[Operation]:
    inner, residual = sizes.tokens * model.ffn_dim * sizes.item, sizes.tokens * model.dim
    yield norm("x_mid", "h2", "post_attention_layernorm.weight", dim=model.dim, count=1, sizes=sizes)
    cast = _cast(model, sizes)
    yield _linear("h2", "gate", inner, "mlp.gate_proj", cast=cast)
    yield Operation(inputs=("gate",), output="silu", size=inner, saved=("gate",))
    yield _linear("h2", "up", inner, "mlp.up_proj", cast=cast)
    yield Operation(inputs=("silu", "up"), output="product", size=inner, saved=("silu", "up"))
    yield _linear("product", "m", residual * sizes.item, "mlp.down_proj")
    yield from _dropout("m", model, sizes)
    yield Operation(
        inputs=("x_mid", "m_left" if model.dropout else "m"),
        output="x_out",
        size=residual * sizes.residual_item,
        is_sum=True,
    )


def _cast(model: ModelConfig, sizes: Sizes) -> int:
    """Bytes of the narrow copy of the residual width that each linear layer makes for itself under autocast."""
    is_autocast = sizes.item != sizes.residual_item
    return sizes.tokens * model.dim * sizes.item if is_autocast else 0


def _linear(
    source: str, output: str, size: int, weight: str, *, cast: int = 0, has_bias: bool = False
) -> Operation:
    bias = (f"{weight}.bias",) if has_bias else ()
    return Operation(
        inputs=(source,),
        output=output,
        size=size,
        saved=() if cast else (source,),
        extra=cast,
        backward_work=cast,
        weights=(*bias, f"{weight}.weight"),
        is_costly=True,
    )


def _turned(source: str, output: str, size: int, sizes: Sizes) -> Operation:
    """Rotary positions, in fp32: it keeps only the angles, which all layers share."""
    wide = size // sizes.item * FP32
    return Operation(inputs=(source,), output=output, size=size, work=wide, backward_work=wide)
