"""The arithmetic that MFU is a share of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Objective
from penstock_trainer.observe.flops import flops_per_token

SMALL = ModelConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=160, tie_embeddings=False)


def decoder(config: ModelConfig, vocab_size: int = 500) -> Decoder:
    model = Decoder(config, vocab_size)
    model.initialize(0)
    return model


def counted(model: torch.nn.Module, seq_len: int, *, sequences: int = 2) -> float:
    """What torch counts in forward and backward, per token."""
    ids = torch.randint(0, 500, (sequences, seq_len))
    # The fused kernels compute the scores again in backward; the formula, like this kernel, does not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Objective(model)({"input_ids": ids, "labels": ids}).sum().backward()
    return counter.get_total_flops() / (sequences * seq_len)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, tie_embeddings=True),
        replace(SMALL, family="qwen3", head_dim=32),
        replace(SMALL, num_kv_heads=4, num_layers=1),
    ],
    ids=["own head", "tied head", "wide heads", "no groups"],
)
@pytest.mark.parametrize("seq_len", [16, 256])
def test_the_formula_is_what_torch_counts(config: ModelConfig, seq_len: int) -> None:
    model = decoder(config)
    # Both count every key; torch counts nothing but products of matrices, and nor does the formula.
    assert flops_per_token(model, seq_len) == pytest.approx(counted(model, seq_len), rel=0.01)


def test_a_looked_up_embedding_is_not_multiplied_and_a_tied_one_is() -> None:
    apart, tied = (decoder(replace(SMALL, tie_embeddings=is_tied)) for is_tied in (False, True))
    assert flops_per_token(apart, 64) == flops_per_token(tied, 64)
    assert sum(p.numel() for p in apart.parameters()) > sum(p.numel() for p in tied.parameters())


def test_attention_counts_no_more_keys_than_a_sliding_window_has() -> None:
    windowed = decoder(replace(SMALL, family="mistral", sliding_window=32))
    assert flops_per_token(windowed, 1024) == flops_per_token(windowed, 32)


def test_a_model_of_transformers_is_counted_by_its_config() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config)
    assert flops_per_token(model, 128) == pytest.approx(counted(model, 128), rel=0.01)


def test_what_the_formula_does_not_know_has_no_utilisation() -> None:
    assert flops_per_token(torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Linear(8, 2)), 1) is None
    partly_frozen = decoder(SMALL)
    partly_frozen.norm.weight.requires_grad_(False)
    assert flops_per_token(partly_frozen, 16) is None
