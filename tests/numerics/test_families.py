"""Every family of the decoder against transformers: what it computes, and its directories in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock_trainer.contract.config import ModelConfig, RopeScaling
from penstock_trainer.errors import ModelError
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import (
    ARCHITECTURES,
    hf_config,
    hf_name,
    model_config,
    read_pretrained,
)
from penstock_trainer.model.rotary import frequencies, rotary

VOCAB_SIZE = 97
SEQ_LEN = 40

# fp32 through two layers; the two differ in the order of sums only (fused norm, rotary in pairs).
TOLERANCE = 1e-5

LLAMA = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=52, tie_embeddings=False)
MISTRAL = replace(LLAMA, family="mistral", head_dim=6, norm_eps=1e-6)
QWEN2 = replace(LLAMA, family="qwen2", rope_theta=1e6, tie_embeddings=True)
QWEN3 = replace(LLAMA, family="qwen3", head_dim=16, num_kv_heads=1, tie_embeddings=True)
CONFIGS = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tie_embeddings=True, num_kv_heads=4),
    "llama linear": replace(LLAMA, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "llama llama3": replace(
        LLAMA,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=24, low_freq_factor=1.5),
    ),
    "llama yarn": replace(LLAMA, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position=64)),
    "mistral": MISTRAL,
    "mistral tied": replace(MISTRAL, tie_embeddings=True),
    "mistral window": replace(MISTRAL, sliding_window=7),
    "mistral window beyond the sequence": replace(MISTRAL, sliding_window=SEQ_LEN),
    "qwen2": QWEN2,
    "qwen2 untied yarn": replace(
        QWEN2,
        tie_embeddings=False,
        rope_scaling=RopeScaling(
            kind="yarn", factor=2.0, original_max_position=20, beta_fast=8.0, beta_slow=0.5
        ),
    ),
    "qwen3": QWEN3,
    "qwen3 untied": replace(QWEN3, tie_embeddings=False, num_kv_heads=2, head_dim=None),
    "qwen3 yarn": replace(QWEN3, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position=32)),
}


def with_loud_weights(model: nn.Module) -> nn.Module:
    """Large weights, so that attention is far from uniform, and biases and norms that are not what they begin as."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.ndim == 1 and not name.endswith("bias")
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + float(is_norm))
    return model.eval()


def decoder(config: ModelConfig) -> Decoder:
    model = Decoder(config, VOCAB_SIZE)
    with_loud_weights(model)
    return model


def exported(model: Decoder, directory: Path) -> Any:
    """What transformers makes of a directory with our config.json and our weights."""
    from safetensors.torch import save_file

    told = hf_config(model.config, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, eos_id=0)
    (directory / "config.json").write_text(json.dumps(told))
    weights = {hf_name(name): weight.detach() for name, weight in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    theirs, loaded = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loaded.values()), loaded
    return theirs.eval()


def tokens(batch: int = 3) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def padding() -> Tensor:
    """Left, right, and none."""
    mask = torch.ones(3, SEQ_LEN, dtype=torch.int64)
    mask[0, :9] = 0
    mask[1, -11:] = 0
    return mask


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=3.0),
        RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
        RopeScaling(kind="yarn", factor=7.0, original_max_position=4096),
        RopeScaling(kind="yarn", factor=1.0, original_max_position=32768),
    ],
    ids=lambda scaling: f"{scaling.kind} {scaling.factor}" if scaling else "plain",
)
def test_frequencies_are_those_of_transformers_to_the_last_bit(scaling: RopeScaling | None) -> None:
    config = replace(LLAMA, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    told = hf_config(config, vocab_size=VOCAB_SIZE, seq_len=131072, eos_id=0)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**told))
    assert torch.equal(frequencies(config, torch.device("cpu")), theirs.inv_freq)
    cos, _ = rotary(config, 1, torch.device("cpu"))  # of position 0: the attention factor
    assert cos[0, 0].item() == pytest.approx(theirs.attention_scaling, rel=1e-7)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_export_gives_the_same_logits_and_gradients_in_transformers(
    config: ModelConfig, tmp_path: Path
) -> None:
    ours = decoder(config)
    theirs = exported(ours, tmp_path)
    assert type(theirs).__name__ == ARCHITECTURES[config.family]
    logits, expected = ours(input_ids=tokens()), theirs(input_ids=tokens()).logits
    assert expected.std() > 0.5  # otherwise the tolerance would show nothing
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    for output in (logits, expected):
        cross_entropy(output.flatten(0, 1), tokens().roll(-1, 1).flatten()).backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[hf_name(name)], atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padded_sequences_have_the_logits_of_transformers_at_real_tokens(
    config: ModelConfig, tmp_path: Path
) -> None:
    ours = decoder(config)
    theirs = exported(ours, tmp_path)
    mask = padding()
    logits = ours(input_ids=tokens(), attention_mask=mask)
    expected = theirs(input_ids=tokens(), attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], atol=TOLERANCE, rtol=TOLERANCE)
    logits.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in ours.parameters())


SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
THEIRS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, rms_norm_eps=1e-5),
    "llama3 rope": LlamaConfig(
        **SHAPE,
        head_dim=12,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "old spelling of rope": LlamaConfig(
        **SHAPE, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=9),
    "mistral without a window": MistralConfig(**SHAPE, sliding_window=None, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2 yarn": Qwen2Config(
        **SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=20),
    "qwen3 with its own head_dim": Qwen3Config(**SHAPE),
}


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("told", THEIRS.values(), ids=THEIRS)
def test_what_transformers_saves_gives_the_same_logits_here(
    told: PretrainedConfig, shard_size: str, tmp_path: Path
) -> None:
    theirs = with_loud_weights(AutoModelForCausalLM.from_config(told, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    ours = read_pretrained(str(tmp_path)).eval()
    torch.testing.assert_close(
        ours(tokens()), theirs(input_ids=tokens()).logits, atol=TOLERANCE, rtol=TOLERANCE
    )


def test_weights_in_bf16_become_fp32(tmp_path: Path) -> None:
    theirs = with_loud_weights(AutoModelForCausalLM.from_config(THEIRS["qwen3"])).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = read_pretrained(tmp_path.as_uri())
    their_weights = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, their_weights[hf_name(name)].float())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_shape_survives_the_way_to_hugging_face_and_back(config: ModelConfig) -> None:
    told = hf_config(config, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, eos_id=0)
    assert model_config(json.loads(json.dumps(told))) == config


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "rope_type = 'mrope'"),
        ("qwen2", {"rope_parameters": {"mrope_section": [2, 1, 1]}}, "rope mrope_section = "),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            "rope attention_factor = 1.5",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
            "rope truncate = False",
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope mscale = 0.7"),
    ],
)
def test_what_the_decoder_does_not_cover_is_refused_by_name(
    family: str, changed: dict[str, Any], named: str
) -> None:
    told = {"model_type": family, **SHAPE, **changed}
    with pytest.raises(ModelError) as refused:
        model_config(told, where="gs://models/one/config.json")
    message = str(refused.value)
    assert message.startswith("gs://models/one/config.json: the built-in decoder does not cover")
    assert named in message
    assert "Set model.native = false" in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"intermediate_size": None}, "does not describe a model"),
        ({"num_attention_heads": 5}, "does not describe a model: model.num_kv_heads = 2"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
    ],
)
def test_a_config_that_fits_no_shape_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({"model_type": "llama", **SHAPE, **changed})
    with pytest.raises(ModelError, match="has no hidden_size"):
        model_config({"model_type": "llama", "num_attention_heads": 2})
