"""The decoder against transformers' LlamaForCausalLM, its first values, its dropout, and its head apart from its body.

The other families are in test_families.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.contract.sections.model import Family
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import hf_config, hf_name
from penstock_trainer.model.objective import Objective

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

    loss = Objective(model)({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}) / tokens[:, 1:].numel()
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
        loss = (
            Objective(model)({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}) / tokens[:, 1:].numel()
        )
    assert loss.item() == pytest.approx(math.log(VOCAB_SIZE), abs=0.05)


def test_biases_begin_at_zero_and_norms_at_one() -> None:
    families: tuple[Family, ...] = ("qwen2", "qwen3")
    for family in families:
        model = Decoder(replace(tiny_config("").model, family=family), VOCAB_SIZE)
        model.initialize(0)
        vectors = {name: weight for name, weight in model.named_parameters() if weight.ndim == 1}
        own = "k_proj.bias" if family == "qwen2" else "k_norm.weight"
        assert f"layers.1.self_attn.{own}" in vectors
        for name, weight in vectors.items():
            assert (weight == (0.0 if name.endswith("bias") else 1.0)).all(), name


def random_tokens() -> Tensor:
    return torch.randint(VOCAB_SIZE, (4, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def test_dropout_zeroes_its_share_of_what_layers_add_in_training_only() -> None:
    config = ModelConfig(dim=64, num_layers=1, num_heads=4, num_kv_heads=4, ffn_dim=52, dropout=0.25)
    model, plain = decoder(config), decoder(replace(config, dropout=0.0))
    tokens = random_tokens()
    assert torch.equal(model.eval()(tokens), plain(tokens))

    added: dict[str, Tensor] = {}
    layer = model.train().layers[0]
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, x: added.update(stream=x[0]))
    layer.self_attn.register_forward_hook(lambda *given: added.update(attention=given[2]))
    torch.manual_seed(0)
    model(tokens)
    survived = added["stream"] - model.embed_tokens(tokens)
    is_zero = survived.abs() < 1e-6
    # 12288 elements: the share's standard deviation is 0.004.
    assert is_zero.float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(survived[~is_zero], added["attention"][~is_zero] / 0.75, atol=1e-5, rtol=1e-4)


def test_a_window_as_long_as_the_sequence_changes_nothing_and_takes_no_mask() -> None:
    config = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=52, family="mistral")
    plain, tokens = decoder(config), random_tokens()
    masks: list[object] = []
    for window in (SEQ_LEN, SEQ_LEN - 1):
        model = decoder(replace(config, sliding_window=window))
        model.layers[0].register_forward_pre_hook(lambda _, given: masks.append(given[3]))
        assert torch.equal(model(tokens), plain(tokens)) == (window == SEQ_LEN)
    assert masks[0] is None
    assert masks[1] is not None


@pytest.mark.parametrize("tied", [True, False])
def test_a_chunked_head_trains_as_a_whole_one(tied: bool) -> None:
    config = replace(tiny_config("").model, tie_embeddings=tied)
    mask = torch.ones(4, SEQ_LEN, dtype=torch.int64)
    mask[0, :5] = 0
    batch = {"input_ids": random_tokens(), "attention_mask": mask, "labels": random_tokens().roll(-1, 1)}
    batch["labels"][:, -1] = -100
    losses, models = [], []
    for chunk_tokens in (0, 13):
        model = decoder(config)
        loss = Objective(model, chunk_tokens=chunk_tokens)(batch)
        loss.sum().backward()
        losses.append(loss)
        models.append(model)
    # Sums over 188 targets, in another order.
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=1e-6)
    for whole, chunked in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(chunked.grad, whole.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_autocast_changes_the_loss_by_bf16s_rounding_only(family: Family) -> None:
    model = Decoder(replace(tiny_config("").model, family=family), VOCAB_SIZE)
    model.initialize(0)
    batch = {"input_ids": random_tokens(), "labels": random_tokens().roll(-1, 1)}
    losses = []
    for is_narrow in (False, True):
        # Warnings are errors: torch warns where a norm has no fused kernel for its types.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow):
            losses.append(Objective(model, chunk_tokens=16)(batch))
    # Logits near 0.1 with 8 bits of mantissa, of 192 targets; the loss is 192 ln(97) = 878.
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=1e-4)
    losses[1].sum().backward()
