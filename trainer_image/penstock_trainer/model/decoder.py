"""The decoder of Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Modules bear the names that Hugging Face gives them, and rotary positions pair the dims of a head as it does (i with
i + C/2), so an export renames nothing but the root and permutes nothing.

Shape suffixes:

    B  sequences           D  width of the residual stream    V  vocabulary
    T  tokens of each      C  dims of a head                  H  query heads
    F  width of SwiGLU     P  pairs of a head's dims          K  key and value heads
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, rms_norm, scaled_dot_product_attention, silu

from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.model.rotary import rotary, rotate

_INIT_STD = 0.02


class Decoder(nn.Module):
    """Token ids in, logits out. Construction leaves the weights without values; see `initialize`."""

    _no_split_modules = ("DecoderLayer",)
    """The class of its blocks, where Hugging Face's models name theirs."""

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
        number of ranks. Norms are ones and biases zeros. Matrices are normal with std 0.02, and for what adds to the
        residual stream 0.02 / sqrt(2 * num_layers), so that the stream's variance does not grow with depth (GPT-2).
        """
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else _INIT_STD
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of the token after each token of input_ids [B, T].

        `attention_mask` [B, T] is nonzero at real tokens and 0 at padding, left or right; logits at padding mean
        nothing. Without it every token is real.
        """
        return linear(self.hidden(input_ids, attention_mask), self.head_weight())

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """What the head takes: [B, T, D]. Arguments as of `forward`."""
        num_tokens = input_ids.shape[1]
        cos_TP, sin_TP = rotary(self.config, num_tokens, input_ids.device)
        visible = _visible(num_tokens, self.config.sliding_window, attention_mask, input_ids.device)
        x_BTD: Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TP, sin_TP, visible)
        out_BTD: Tensor = self.norm(x_BTD)
        return out_BTD

    def head_weight(self) -> Tensor:
        """The head: [V, D]."""
        return self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGlu(config)

    def forward(self, x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, visible: Tensor | None = None) -> Tensor:
        """The residual stream after this layer. `visible` as of `Attention`."""
        added_BTD = self.self_attn(self.input_layernorm(x_BTD), cos_TP, sin_TP, visible)
        x_BTD = x_BTD + dropout(added_BTD, self.dropout, self.training)
        added_BTD = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + dropout(added_BTD, self.dropout, self.training)


class Attention(nn.Module):
    """Causal attention; H / K query heads share a key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dims_per_head
        self.is_grouped = config.num_kv_heads < config.num_heads
        q_dim, kv_dim = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        has_bias = config.family == "qwen2"
        self.q_proj = nn.Linear(config.dim, q_dim, bias=has_bias)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=has_bias)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=has_bias)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.norms_heads = config.family == "qwen3"
        if self.norms_heads:
            self.q_norm = HeadNorm(self.head_dim, eps=config.norm_eps)
            self.k_norm = HeadNorm(self.head_dim, eps=config.norm_eps)

    def forward(self, x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, visible: Tensor | None = None) -> Tensor:
        """What the heads add to the residual stream.

        `visible` is bool, [T, T] or [B, 1, T, T]: whether the query of a row sees the key of a column. None: all keys
        up to the query's own, without a mask, which the fused kernels are fastest at.
        """
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC, k_BTKC = self.q_proj(x_BTD).view(heads), self.k_proj(x_BTD).view(heads)
        if self.norms_heads:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        y_BHTC = scaled_dot_product_attention(
            rotate(q_BTHC.transpose(1, 2), cos_TP, sin_TP),
            rotate(k_BTKC.transpose(1, 2), cos_TP, sin_TP),
            self.v_proj(x_BTD).view(heads).transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None,
            enable_gqa=self.is_grouped,
        )
        out_BTD: Tensor = self.o_proj(y_BHTC.transpose(1, 2).flatten(2))
        return out_BTD


class HeadNorm(nn.RMSNorm):
    """RMSNorm of what a linear layer gives, in its type: under autocast that is narrower than the norm's weight, for
    which torch has no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type as `x`; normalised over the last dim."""
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


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


def _visible(
    num_tokens: int, window: int | None, attention_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which keys (columns) a query (row) sees, [T, T] or with padding [B, 1, T, T]; None: all up to its own."""
    is_windowed = window is not None and num_tokens > window
    if attention_mask is None and not is_windowed:
        return None
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if window is not None and is_windowed:
        visible = visible.triu(1 - window)
    if attention_mask is None:
        return visible
    # Padding sees itself: a softmax over no key at all would be NaN, and its gradient too.
    itself = torch.eye(num_tokens, dtype=torch.bool, device=device)
    return visible & (attention_mask.bool()[:, None, None, :] | itself)
