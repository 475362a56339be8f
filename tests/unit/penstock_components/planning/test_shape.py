"""The shape that is computed is that of the model that would be built."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from penstock_components.planning.shape import decoder_shape, shape_from_json
from penstock_trainer.contract.config import EngineConfig, JobConfig, ModelConfig
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.contract.sections.model import Family
from penstock_trainer.engines.blocks import find_blocks
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model_shape import main

VOCAB_SIZE = 77
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")


def small(family: Family, *, tied: bool, layers: int) -> ModelConfig:
    return ModelConfig(
        family=family,
        dim=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=52,
        tie_embeddings=tied,
    )


@pytest.mark.parametrize(
    ("family", "tied", "layers"), list(itertools.product(FAMILIES, (True, False), (1, 2, 3)))
)
def test_the_decoders_tensors_and_blocks_are_those_of_the_real_one(
    family: Family, tied: bool, layers: int
) -> None:
    config = small(family, tied=tied, layers=layers)
    model = Decoder(config, VOCAB_SIZE)
    blocks, _ = find_blocks(model)
    block_of = {id(tensor): number for number, block in enumerate(blocks) for tensor in block.parameters()}
    real = [(name, tuple(p.shape), block_of.get(id(p))) for name, p in model.named_parameters()]
    shape = decoder_shape(config, VOCAB_SIZE)
    assert [(one.name, one.shape, one.block) for one in shape.parameters] == real
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_blocks == len(blocks)


def test_a_tied_head_is_counted_once() -> None:
    tied, untied = (decoder_shape(small("llama", tied=tied, layers=2), VOCAB_SIZE) for tied in (True, False))
    assert untied.num_parameters - tied.num_parameters == VOCAB_SIZE * 24


def test_only_matrices_decay() -> None:
    shape = decoder_shape(small("qwen2", tied=True, layers=2), VOCAB_SIZE)
    spared = {one.name.rpartition(".")[0].rpartition(".")[2] for one in shape.parameters if not one.decays}
    assert spared == {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "q_proj",
        "k_proj",
        "v_proj",
    }


def test_what_the_trainer_prints_of_a_decoder_is_what_is_computed_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small("qwen3", tied=True, layers=3)
    assert main([f"--config={JobConfig(model=config).to_json()}", f"--vocab-size={VOCAB_SIZE}"]) == 0
    assert shape_from_json(capsys.readouterr().out) == decoder_shape(config, VOCAB_SIZE)


def test_a_users_model_is_told_with_its_blocks_and_without_activations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = "penstock_trainer.model.digits:digits_classifier"
    config = JobConfig(
        model=ModelConfig(source=source, options={"channels": 4}), engine=EngineConfig(wrap_class="Conv2d")
    )
    assert main([f"--config={config.to_json()}"]) == 0
    shape = shape_from_json(capsys.readouterr().out)
    assert shape.decoder is None
    assert [(one.name, one.shape, one.block) for one in shape.parameters] == [
        ("features.0.weight", (4, 1, 3, 3), 0),
        ("features.0.bias", (4,), 0),
        ("features.2.weight", (8, 4, 3, 3), 1),
        ("features.2.bias", (8,), 1),
        ("head.weight", (10, 128), None),
        ("head.bias", (10,), None),
    ]


def test_a_directory_is_told_from_its_config_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import Qwen2Config

    told = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=52,
        tie_word_embeddings=True,
    )
    told.save_pretrained(tmp_path)
    shapes = []
    for native in (True, False):
        config = JobConfig(model=ModelConfig(source=str(tmp_path), native=native))
        assert main([f"--config={config.to_json()}"]) == 0
        shapes.append(shape_from_json(capsys.readouterr().out))
    native, foreign = shapes
    assert native.decoder is not None
    assert native == decoder_shape(native.decoder, VOCAB_SIZE)
    assert foreign.decoder is None
    # transformers declares the modules of a layer in another order.
    assert {(f"model.{one.name}", one.shape, one.block) for one in native.parameters} == {
        (one.name, one.shape, one.block) for one in foreign.parameters
    }


def test_a_model_that_cannot_be_told_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--config={JobConfig().to_json()}"]) == 2
    assert "Give --vocab-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "an object with the fields of ModelShape"),
        ("no JSON", "is not JSON"),
        (json.dumps({"parameters": [{"name": "a", "shape": [2, 0]}]}), "sizes of at least 1"),
        (json.dumps({"parameters": [{"name": "a", "shape": ["2"]}]}), "a whole number"),
        (json.dumps({"parameters": [], "blocks": 3}), "there is no field 'blocks'"),
    ],
)
def test_what_the_trainer_cannot_have_printed_is_refused(text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        shape_from_json(text)


def test_the_shape_of_a_source_is_not_made_up() -> None:
    with pytest.raises(ContractError, match="the shape of a source is the source's own"):
        decoder_shape(ModelConfig(source="/models/some"), VOCAB_SIZE)
