"""Arithmetic of a model: what its step needs, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import SplitsHead


def flops_per_token(model: nn.Module, seq_len: int) -> float | None:
    """FLOPs of forward and backward for one token of a sequence of `seq_len`: 6N + 12 L H Q T.

    Chowdhery et al., PaLM (2022), appendix B: L layers, H heads of Q dims, T tokens that each sees; a multiply-add is
    two. Attention counts all T keys although the mask leaves half of them, as the paper does; behind a sliding window T
    is the window. Recomputed activations are not counted. N are the weights that a token is multiplied by: every matrix
    but an embedding, in which rows are looked up, unless the head shares it; norms and biases are left out (less than
    0.1 % of a model of any use).

    Known for the built-in decoder and for text models of transformers whose config has the same sizes. None for others
    (of a convolution a weight is used at each position, which 6N does not know), for mixtures of experts, whose tokens
    take a part of the weights, and where weights are frozen.
    """
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    attention = _attention_flops(model, seq_len)
    return None if attention is None else 6.0 * _multiplied_weights(model) + attention


def _attention_flops(model: nn.Module, seq_len: int) -> float | None:
    """12 L H Q T of one token; None for a model whose attention is not known."""
    config: Any = getattr(model, "config", None)
    layers: int
    width: int
    if isinstance(model, Decoder):
        layers, width = config.num_layers, config.num_heads * config.dims_per_head
    elif _is_plain_text_model(config):
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    else:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    if not isinstance(model, Decoder) and getattr(config, "use_sliding_window", True) is False:
        window = None
    return 12.0 * layers * width * min(seq_len, window or seq_len)


def _is_plain_text_model(config: Any) -> bool:
    """Whether it is a transformers config of a decoder without parts beside its text and without experts."""
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    others = ("text_config", "vision_config", "num_experts", "num_local_experts", "n_routed_experts")
    is_encoder = getattr(config, "is_encoder_decoder", False)
    return (
        all(isinstance(getattr(config, name, None), int) for name in sizes)
        and not any(getattr(config, name, None) for name in others)
        and not is_encoder
    )


def _multiplied_weights(model: nn.Module) -> int:
    looked_up = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in looked_up and not isinstance(_owner(model, name), nn.Embedding):
            del looked_up[id(parameter)]  # a tied head multiplies by it
    if isinstance(model, SplitsHead):
        looked_up.pop(id(model.head_weight()), None)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2)
    return matrices - sum(looked_up.values())


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
