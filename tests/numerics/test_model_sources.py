"""Where a model comes from: the seed, a Hugging Face directory, transformers, a user's function; and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from penstock_local.storage import ObjectStore, build_app
from penstock_trainer import storage as penstock_storage
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.errors import ModelError, UserFunctionError
from penstock_trainer.model.build import build_model
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.digits import Digits, digits
from penstock_trainer.model.hugging_face import read_pretrained

VOCAB_SIZE = 61
TINY = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24)
CLASSIFIER = ModelConfig(source="penstock_trainer.model.digits:digits_classifier")


def llama(**changed: Any) -> LlamaForCausalLM:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changed}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path)
    return tmp_path


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_config(directory: Path, **changed: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# Built in


@pytest.mark.parametrize("config", [TINY, CLASSIFIER], ids=["decoder", "user's function"])
def test_first_weights_are_the_seeds(config: ModelConfig) -> None:
    models = []
    for seed, before in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(before)
        models.append(build_model(config, vocab_size=VOCAB_SIZE, seed=seed))
        assert torch.initial_seed() == before  # the caller's generator is left alone
    assert equal(models[0], models[1])
    assert not equal(models[0], models[2])
    weights = list(models[0].parameters())
    assert {(weight.dtype, weight.device.type) for weight in weights} == {(torch.float32, "cpu")}


def test_the_decoder_needs_a_vocabulary() -> None:
    with pytest.raises(ModelError, match="needs a dataset with a vocabulary"):
        build_model(TINY, vocab_size=None, seed=0)


def test_a_llama_that_transformers_could_not_load_is_refused_before_training() -> None:
    config = replace(TINY, num_heads=3, num_kv_heads=3, head_dim=4)
    with pytest.raises(ModelError, match=r"model.dim = 16 is not a multiple of model.num_heads \(3\)"):
        build_model(config, vocab_size=VOCAB_SIZE, seed=0)
    build_model(replace(config, family="mistral"), vocab_size=VOCAB_SIZE, seed=0)


# A Hugging Face directory


def test_a_covered_directory_is_trained_as_the_decoder_with_its_weights(directory: Path) -> None:
    theirs = llama().from_pretrained(directory)
    for source in (str(directory), directory.as_uri()):
        model = build_model(ModelConfig(source=source, dropout=0.1), vocab_size=VOCAB_SIZE, seed=0)
        assert isinstance(model, Decoder)
        assert model.config.dropout == 0.1
        assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[storage.Bucket]:
    """Of a running stand-in for Cloud Storage, to which the environment points Google's client."""
    store = ObjectStore(tmp_path / "objects")
    app = build_app(store, project_id="demo", project_number=123456789012)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, http="httptools", log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    endpoint = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "demo")
    penstock_storage._storage_of.cache_clear()
    client = storage.Client(
        project="demo", credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint}
    )
    yield client.create_bucket("models")
    client.close()
    penstock_storage._storage_of.cache_clear()
    server.should_exit = True
    thread.join()
    store.close()


@pytest.mark.parametrize("native", [True, False])
def test_a_sharded_model_is_read_from_a_bucket(native: bool, bucket: storage.Bucket, tmp_path: Path) -> None:
    theirs = llama()
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name in names:
        bucket.blob(f"hub/llama/{name}").upload_from_filename(str(tmp_path / "saved" / name))
    bucket.blob("hub/llama/original/weights.pth").upload_from_string(b"the same in another format")
    bucket.blob("hub/llama-large/config.json").upload_from_string(b"another model")

    config = ModelConfig(source="gs://models/hub/llama", native=native)
    model: Any = build_model(config, vocab_size=VOCAB_SIZE, seed=0)
    assert isinstance(model, Decoder if native else LlamaForCausalLM)
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    tokens = torch.arange(12).reshape(2, 6)
    output = model.eval()(input_ids=tokens)
    torch.testing.assert_close(getattr(output, "logits", output), theirs.eval()(tokens).logits)

    with pytest.raises(
        ModelError, match=r"gs://models/hub is not a Hugging Face model: it has no config.json"
    ):
        read_pretrained("gs://models/hub")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a Hugging Face model: it has no config.json"):
        read_pretrained(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(text: str, directory: Path) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json is not"):
        read_pretrained(str(directory))


def test_weights_of_another_shape_are_refused_with_both_shapes(directory: Path) -> None:
    change_config(directory, intermediate_size=28)
    with pytest.raises(
        ModelError, match=r"mlp.down_proj.weight has the shape \[16, 24\], expected \[16, 28\] by config.json"
    ):
        read_pretrained(str(directory))


def test_missing_and_unexpected_weights_are_named(directory: Path) -> None:
    name = "model.layers.1.self_attn.o_proj"
    change_weights(directory, lambda weights: weights.update({f"{name}.bias": weights.pop(f"{name}.weight")}))
    with pytest.raises(ModelError, match=rf"missing {name}.weight; unexpected {name}.bias"):
        read_pretrained(str(directory))


def test_of_many_missing_weights_some_are_named_and_all_are_counted(directory: Path) -> None:
    change_weights(
        directory, lambda weights: [weights.pop(name) for name in list(weights) if "layers" in name]
    )
    with pytest.raises(ModelError, match=r"missing model.layers.0.input_layernorm.weight, .* and 13 more\."):
        read_pretrained(str(directory))


def test_an_untied_head_that_is_missing_is_explained(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing lm_head.weight.*needs tie_word_embeddings = true"):
        read_pretrained(str(directory))
    change_config(directory, tie_word_embeddings=True)
    assert read_pretrained(str(directory)).config.tie_embeddings


def test_a_tied_head_may_be_stored_but_must_be_the_embedding(directory: Path) -> None:
    change_config(directory, tie_word_embeddings=True)
    with pytest.raises(
        ModelError, match=r"lm_head.weight is not the token embedding, but config.json ties them"
    ):
        read_pretrained(str(directory))
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(directory, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(read_pretrained(str(directory)).head_weight(), embedding)


def test_quantized_weights_are_refused(directory: Path) -> None:
    name = "model.norm.weight"
    change_weights(directory, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(ModelError, match=rf"{name} is torch.int8; allowed are float16"):
        read_pretrained(str(directory))


def test_pickled_weights_are_not_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Pickled weights"):
        read_pretrained(str(directory))
    with pytest.raises(ModelError, match="transformers cannot load"):
        build_model(ModelConfig(source=str(directory), native=False), vocab_size=None, seed=0)


def test_half_a_file_and_an_index_to_nowhere_are_refused(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors is not a whole safetensors file"):
        read_pretrained(str(directory))
    weights.unlink()
    index = directory / "model.safetensors.index.json"
    for text, message in (
        (
            '{"weight_map": {"lm_head.weight": "gone.safetensors"}}',
            "names gone.safetensors, which is not there",
        ),
        (
            '{"weight_map": {"lm_head.weight": "../x.safetensors"}}',
            "'../x.safetensors', which is not a file beside",
        ),
        ("{}", "is not an index"),
    ):
        index.write_text(text)
        with pytest.raises(ModelError, match=message):
            read_pretrained(str(directory))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(directory: Path) -> None:
    for native in (True, False):
        config = ModelConfig(source=str(directory), native=native)
        build_model(config, vocab_size=VOCAB_SIZE - 1, seed=0)
        with pytest.raises(
            ModelError, match=r"token id outside the vocabulary: .* up to 61, .* knows 61 ids"
        ):
            build_model(config, vocab_size=VOCAB_SIZE + 1, seed=0)


def test_what_the_source_cannot_take_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="options are the arguments of a module:function"):
        build_model(ModelConfig(source=str(directory), options={"a": 1}), vocab_size=None, seed=0)
    for config in (ModelConfig(source=str(directory), native=False), CLASSIFIER):
        with pytest.raises(ModelError, match="dropout is of the built-in decoder only"):
            build_model(replace(config, dropout=0.5), vocab_size=None, seed=0)


# transformers' own


def test_a_family_that_the_decoder_does_not_cover_is_transformers_own(tmp_path: Path) -> None:
    told = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    theirs = AutoModelForCausalLM.from_config(told).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    model: Any = build_model(ModelConfig(source=str(tmp_path)), vocab_size=VOCAB_SIZE, seed=0)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert torch.equal(model.transformer.wte.weight, theirs.transformer.wte.weight.float())


def test_a_model_of_images_and_text_is_trained_with_both(tmp_path: Path) -> None:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    told = LlavaConfig(
        vision_config=vision,
        text_config=llama().config,
        image_token_id=60,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(told).save_pretrained(tmp_path)
    model: Any = build_model(ModelConfig(source=str(tmp_path)), vocab_size=VOCAB_SIZE, seed=0)
    assert isinstance(model, LlavaForConditionalGeneration)
    tokens = torch.tensor([[60, 60, 60, 60, 1, 2]])
    logits = model(input_ids=tokens, pixel_values=torch.randn(1, 3, 8, 8)).logits
    assert logits.shape == (1, 6, VOCAB_SIZE)
    with pytest.raises(ModelError, match="token id outside the vocabulary"):
        build_model(ModelConfig(source=str(tmp_path)), vocab_size=VOCAB_SIZE + 1, seed=0)


def test_weights_that_transformers_would_make_up_are_refused(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing model.layers.0.mlp.up_proj.weight"):
        build_model(ModelConfig(source=str(directory), native=False), vocab_size=None, seed=0)


def test_without_transformers_the_extra_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"not installed: pip install 'penstock\[trainer\]'"):
        build_model(ModelConfig(source=str(directory), native=False), vocab_size=None, seed=0)
    assert isinstance(build_model(ModelConfig(source=str(directory)), vocab_size=None, seed=0), Decoder)


# A user's function


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("org/model", {}, "must be empty, a Hugging Face directory"),
        ("numerics.user_models:", {}, "must be empty, a Hugging Face directory"),
        ("no_such_module:build", {}, "no_such_module cannot be imported"),
        ("numerics.user_models:absent", {}, "numerics.user_models has no function absent"),
        ("numerics.user_models:weights", {}, "numerics.user_models has no function weights"),
        ("numerics.user_models:linear", {"wide": 2}, r"cannot be called with {'wide': 2}"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserFunctionError, match=message):
        build_model(ModelConfig(source=source, options=options), vocab_size=None, seed=0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("numerics.user_models:nothing", r"returned NoneType; it must return the torch.nn.Module"),
        ("numerics.user_models:half", r"whose weight is torch.bfloat16 on cpu; it must be torch.float32"),
    ],
)
def test_a_function_that_builds_no_model_is_refused(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(ModelConfig(source=source), vocab_size=None, seed=0)


def test_options_are_the_functions_arguments() -> None:
    config = ModelConfig(source="numerics.user_models:linear", options={"width": 7})
    model: Any = build_model(config, vocab_size=None, seed=0)
    assert model.in_features == 7


# The digits


def stacked(dataset: Digits) -> dict[str, Tensor]:
    samples = [dataset[index] for index in range(len(dataset))]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_the_digits_are_split_once_and_for_all() -> None:
    train, evaluation = stacked(digits("train")), stacked(digits("evaluation", uri="ignored"))
    assert (len(train["labels"]), len(evaluation["labels"])) == (1438, 359)
    assert (train["image"].shape, train["image"].dtype) == ((1438, 1, 8, 8), torch.float32)
    assert (train["labels"].shape, train["labels"].dtype) == ((1438,), torch.int64)
    assert (train["image"].min(), train["image"].max()) == (0, 1)
    assert evaluation["labels"].bincount().min() > 20
    with pytest.raises(ValueError, match="split = 'test' is not valid: it must be 'train' or 'evaluation'"):
        digits("test")  # type: ignore[arg-type]


def test_the_classifier_learns_to_read_digits() -> None:
    train, evaluation = stacked(digits("train")), stacked(digits("evaluation"))
    model = build_model(replace(CLASSIFIER, options={"channels": 8}), vocab_size=None, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(110):  # five epochs
        part = slice(step * 64 % 1408, step * 64 % 1408 + 64)
        optimizer.zero_grad()
        cross_entropy(model(image=train["image"][part]), train["labels"][part]).backward()
        optimizer.step()
    with torch.no_grad():
        correct = model(image=evaluation["image"]).argmax(-1) == evaluation["labels"]
    assert correct.float().mean() > 0.9
