"""The decoder against transformers' LlamaForCausalLM, and its first values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.export import hf_config, hf_name
from penstock_trainer.model.decoder import Decoder, next_token_loss

VOCAB_SIZE = 97
SEQ_LEN = 48

# fp32 through two layers; the two differ in the order of sums only (fused attention, fused norm).
TOLERANCE = 1e-5


def decoder(config: ModelConfig) -> Decoder:
    """With weights of std 0.3 instead of 0.02, so that attention is far from uniform and errors are not hidden."""
    model = Decoder(config, VOCAB_SIZE)
    model.initialize(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(15.0 if weight.ndim == 2 else 1.1)
    return model


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=52, tie_embeddings=True),
        ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=52, tie_embeddings=False),
        ModelConfig(
            dim=48, num_layers=3, num_heads=4, num_kv_heads=1, ffn_dim=20, rope_theta=500.0, norm_eps=1e-3
        ),
    ],
    ids=["tied", "grouped", "multi-query, other theta and eps"],
)
def test_logits_loss_and_gradients_are_those_of_transformers(config: ModelConfig) -> None:
    model = decoder(config)
    told = hf_config(config, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, eos_id=0)
    theirs = LlamaForCausalLM(LlamaConfig(**told))
    named = {hf_name(name): weight for name, weight in model.named_parameters()}
    missing, unexpected = theirs.load_state_dict(named, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])

    tokens = torch.randint(VOCAB_SIZE, (3, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    their_logits = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, their_logits, atol=TOLERANCE, rtol=TOLERANCE)

    loss = next_token_loss(logits, tokens[:, 1:])
    their_loss = theirs.loss_function(
        their_logits, labels=None, vocab_size=VOCAB_SIZE, shift_labels=tokens[:, 1:].contiguous()
    )
    assert loss.item() == pytest.approx(their_loss.item(), abs=TOLERANCE)

    loss.backward()
    their_loss.backward()
    their_gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, their_gradients[hf_name(name)], atol=TOLERANCE, rtol=1e-4)


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    config = tiny_config("").model
    shallow, deep = Decoder(config, VOCAB_SIZE), Decoder(replace(config, num_layers=8), VOCAB_SIZE)
    shallow.initialize(1)
    deep.initialize(1)
    name = "layers.1.mlp.gate_proj.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    deep.initialize(2)
    assert not torch.equal(shallow.get_parameter(name), deep.get_parameter(name))


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    model = Decoder(tiny_config("").model, VOCAB_SIZE)
    model.initialize(0)
    tokens = torch.randint(VOCAB_SIZE, (8, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(VOCAB_SIZE), abs=0.05)
