"""Rotary positions and the three ways of stretching them, by the formulas of transformers 5 (modeling_rope_utils).

Shape suffixes: T positions, C dims of a head, P pairs of them (C / 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock_trainer.contract.config import ModelConfig, RopeScaling


def rotary(config: ModelConfig, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, P] of every position's angles, in fp32; with yarn times its attention factor.

    Computed in each forward pass rather than kept in a buffer, which DeepSpeed would cast to bf16: from position 256
    on, bf16 no longer tells neighbours apart.
    """
    positions_T = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles_TP = torch.outer(positions_T, frequencies(config, device))
    scaling = config.rope_scaling
    factor = yarn_attention_factor(scaling.factor) if scaling and scaling.kind == "yarn" else 1.0
    return angles_TP.cos() * factor, angles_TP.sin() * factor


def rotate(x_BHTC: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn the pair (i, i + C/2) of every head by the position's i-th angle."""
    first, second = x_BHTC.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TP - second * sin_TP, second * cos_TP + first * sin_TP), dim=-1)
    return turned.to(x_BHTC.dtype)


def yarn_attention_factor(factor: float) -> float:
    """By how much yarn lengthens queries and keys (arXiv:2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of every pair of dims, [P]; in fp32 and operation by operation as transformers does it.

    A last bit of a frequency, times some thousand positions, is an angle that shows in the logits.
    """
    num_dims = config.dims_per_head
    exponent_P = torch.arange(0, num_dims, 2, device=device, dtype=torch.float32) / num_dims
    period_P = config.rope_theta**exponent_P
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / period_P
    if scaling.kind == "linear":
        return 1.0 / period_P / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(1.0 / period_P, scaling)
    return _yarn(period_P, scaling, theta=config.rope_theta)


def _llama3(plain_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones stay, those between are blended by how often they fit the old length."""
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_P = 2 * math.pi / plain_P
    kept_P = (original / wavelength_P - low) / (high - low)
    blended_P = (1 - kept_P) * plain_P / scaling.factor + kept_P * plain_P
    stretched_P = torch.where(wavelength_P > original / low, plain_P / scaling.factor, blended_P)
    return torch.where(wavelength_P < original / high, plain_P, stretched_P)


def _yarn(period_P: Tensor, scaling: RopeScaling, *, theta: float) -> Tensor:
    """Dims that turn often over the old length stay, those that hardly turn are stretched, with a ramp between."""
    num_dims = 2 * len(period_P)

    def dim_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return num_dims * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(dim_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_that_turns(scaling.beta_slow)), num_dims - 1)
    width = high - low if high != low else 0.001
    pairs_P = torch.arange(len(period_P), device=period_P.device, dtype=torch.float32)
    kept_P = 1 - ((pairs_P - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * period_P) * (1 - kept_P) + 1.0 / period_P * kept_P
