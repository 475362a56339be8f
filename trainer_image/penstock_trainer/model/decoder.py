"""Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention, optionally a tied head.

Modules bear the names that Hugging Face's LlamaForCausalLM gives them, and rotary positions pair the dims of a head as
it does (i with i + C/2), so an export renames nothing but the root and permutes nothing.

Shape suffixes:

    B  sequences           D  width of the residual stream    V  vocabulary
    T  tokens of each      C  dims of a head                  H  query heads
    F  width of SwiGLU     K  key and value heads
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from penstock_trainer.contract.config import ModelConfig

_INIT_STD = 0.02


class Decoder(nn.Module):
    """Token ids in, logits out. Construction leaves the weights without values; see `initialize`."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(vocab_size, config.dim)
            self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            if not config.tie_embeddings:
                self.lm_head = nn.Linear(config.dim, vocab_size, bias=False)
        self.to_empty(device="cpu")

    def initialize(self, seed: int) -> None:
        """Give every weight its first value.

        The value depends on the seed and the weight's name alone: not on the order of modules, the engine or the
        number of ranks. Normal with std 0.02, and for what adds to the residual stream 0.02 / sqrt(2 * num_layers), so
        that the stream's variance does not grow with depth (GPT-2).
        """
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.ones_(weight)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else _INIT_STD
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of the token after each token."""
        x_BTD = self.embed_tokens(tokens_BT)
        rotary = _rotary(self.config, tokens_BT.shape[1], tokens_BT.device)
        for layer in self.layers:
            x_BTD = layer(x_BTD, *rotary)
        x_BTD = self.norm(x_BTD)
        head_VD = self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight
        return linear(x_BTD, head_VD)


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGlu(config)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TC, sin_TC)
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class Attention(nn.Module):
    """Causal attention; H / K query heads share a key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.is_grouped = config.num_kv_heads < config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """What the heads add to the residual stream."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BHTC = _rotate(self.q_proj(x_BTD).view(heads).transpose(1, 2), cos_TC, sin_TC)
        k_BKTC = _rotate(self.k_proj(x_BTD).view(heads).transpose(1, 2), cos_TC, sin_TC)
        v_BKTC = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        y_BHTC = scaled_dot_product_attention(
            q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=self.is_grouped
        )
        out_BTD: Tensor = self.o_proj(y_BHTC.transpose(1, 2).flatten(2))
        return out_BTD


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the layer adds to the residual stream."""
        out_BTD: Tensor = self.down_proj(silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy over all tokens, in nats; computed in fp32 whatever the logits are."""
    return cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def _rotary(config: ModelConfig, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, in fp32.

    Computed in each forward pass rather than kept in a buffer, which DeepSpeed would cast to bf16: from position 256
    on, bf16 no longer tells neighbours apart.
    """
    head_dim = config.dim // config.num_heads
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / config.rope_theta**exponent)
    return angles.cos(), angles.sin()


def _rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turn the pair (i, i + C/2) of every head by the position's i-th angle."""
    first, second = x_BHTC.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TC - second * sin_TC, second * cos_TC + first * sin_TC), dim=-1)
    return turned.to(x_BHTC.dtype)
