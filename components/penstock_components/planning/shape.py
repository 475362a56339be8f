"""The parameters of a model by name and shape: what its memory and its traffic follow from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.contract.fields import parse_json, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter tensor of a model; one that is used in two places is one."""

    name: str
    """As in `named_parameters()`."""
    shape: tuple[int, ...]
    block: int | None = None
    """The block that it belongs to; None: it is of the rest of the model, which FSDP2 wraps as the root."""
    is_trained: bool = True

    def __post_init__(self) -> None:
        require(all(size > 0 for size in self.shape), "shape", self.shape, "sizes of at least 1")

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it: to tensors of two or more dims (penstock_trainer.optim)."""
        return len(self.shape) >= 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a plan has to know of a model."""

    parameters: tuple[Parameter, ...]
    """In the order of `named_parameters()`."""
    decoder: ModelConfig | None = None
    """Shape of the built-in decoder, whose activations are known; None: of any other model only parameters are."""
    vocab_size: int = 0
    """Of the built-in decoder."""
    buffers: int = 0
    """Bytes that the model keeps besides its parameters, on every rank."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Those with a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)

    @property
    def num_blocks(self) -> int:
        """Blocks are numbered from 0."""
        return 1 + max((p.block for p in self.parameters if p.block is not None), default=-1)

    def members(self, block: int | None) -> tuple[Parameter, ...]:
        """The parameters of a block; of None, those that belong to none."""
        return tuple(parameter for parameter in self.parameters if parameter.block == block)


def decoder_shape(model: ModelConfig, vocab_size: int) -> ModelShape:
    """The built-in decoder of this shape (penstock_trainer.model.decoder), without making it.

    Raises ContractError for a config with a source: its shape is the source's, which
    `python -m penstock_trainer.model_shape` tells and `shape_from_json` reads.
    """
    require(
        not model.source, "model.source", model.source, "empty: the shape of a source is the source's own"
    )
    require(vocab_size > 0, "vocab_size", vocab_size, "at least 1")
    tensors = dict(_decoder_tensors(model, vocab_size))
    parameters = (Parameter(name=name, shape=shape, block=_layer_of(name)) for name, shape in tensors.items())
    return ModelShape(parameters=tuple(parameters), decoder=model, vocab_size=vocab_size)


def shape_from_json(text: str) -> ModelShape:
    """The shape that `python -m penstock_trainer.model_shape` has printed. Raises ContractError for anything else."""
    return parse_json(ModelShape, text, "the output of penstock_trainer.model_shape")


def _decoder_tensors(model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed_tokens.weight", (vocab_size, model.dim)
    for layer in range(model.num_layers):
        for name, shape in _layer_tensors(model):
            yield f"layers.{layer}.{name}", shape
    yield "norm.weight", (model.dim,)
    if not model.tie_embeddings:
        yield "lm_head.weight", (vocab_size, model.dim)


def _layer_tensors(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim = model.dims_per_head
    q_dim, kv_dim = model.num_heads * head_dim, model.num_kv_heads * head_dim
    yield "input_layernorm.weight", (model.dim,)
    for name, rows in (("q_proj", q_dim), ("k_proj", kv_dim), ("v_proj", kv_dim)):
        yield f"self_attn.{name}.weight", (rows, model.dim)
        if model.family == "qwen2":
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (model.dim, q_dim)
    if model.family == "qwen3":
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield "post_attention_layernorm.weight", (model.dim,)
    yield "mlp.gate_proj.weight", (model.ffn_dim, model.dim)
    yield "mlp.up_proj.weight", (model.ffn_dim, model.dim)
    yield "mlp.down_proj.weight", (model.dim, model.ffn_dim)


def _layer_of(name: str) -> int | None:
    """Blocks are the decoder's layers (penstock_trainer.engines.blocks.find_blocks)."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None
