"""The model that a config asks for, with its first weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.errors import ModelError
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import covers, load_directory, read_config
from penstock_trainer.model.source_directory import is_directory, source_directory
from penstock_trainer.user_function import call_user_function


def build_model(config: ModelConfig, *, vocab_size: int | None, seed: int) -> nn.Module:
    """The model on CPU in fp32, in training mode, with its first weights; equal ones for an equal seed.

    `vocab_size` is that of the dataset's tokenizer; None for data that is not text. Blocks on storage, and downloads
    what lies at gs://. Raises ModelError for a source that cannot be read, that the decoder does not cover, with weights that are not finite, or whose
    vocabulary is smaller than the dataset's, UserFunctionError for a function that cannot be called, and StorageError.
    """
    if not config.source:
        return _built_in(config, vocab_size, seed)
    if is_directory(config.source):
        model = _from_directory(config, vocab_size, seed)
    else:
        model = _from_function(config, seed)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ModelError(
                f"{config.source}: the weight {name} has values that are not finite. Give an intact model."
            )
    return model


def _built_in(config: ModelConfig, vocab_size: int | None, seed: int) -> Decoder:
    if vocab_size is None:
        raise ModelError(
            "the built-in decoder needs a dataset with a vocabulary. Give model.source, or train on token shards (data.uri)."
        )
    if config.family == "llama" and config.dim % config.num_heads:
        raise ModelError(
            f"model.dim = {config.dim} is not a multiple of model.num_heads ({config.num_heads}), which transformers "
            "demands of a llama, head_dim or not: the export could not be loaded. Use family mistral or qwen3."
        )
    model = Decoder(config, vocab_size)
    model.initialize(seed)
    return model


def _from_directory(config: ModelConfig, vocab_size: int | None, seed: int) -> nn.Module:
    if config.options:
        raise ModelError(
            f"model.options = {dict(config.options)!r} with model.source = {config.source!r}: options are the "
            "arguments of a module:function. Leave them out."
        )
    with source_directory(config.source) as directory:
        told = read_config(directory, source_uri=config.source)
        if config.native and covers(told):
            model: Any = load_directory(directory, source_uri=config.source, dropout=config.dropout)
            known = model.vocab_size
        else:
            _refuse_dropout(config)
            model = _from_transformers(directory, config.source, seed)
            known = model.config.get_text_config().vocab_size
    if vocab_size is not None and known < vocab_size:
        raise ModelError(
            f"token id outside the vocabulary: the dataset's tokenizer has ids up to {vocab_size - 1}, the model at "
            f"{config.source} knows {known} ids. Stage the data with the model's own tokenizer."
        )
    return cast("nn.Module", model)


def in_transformers(directory: Path, source_uri: str) -> tuple[Any, Any]:
    """transformers' own config of a directory's model, and the auto class that makes the model: causal or image-text-to-text.

    Raises ModelError: transformers is not installed, or does not know the model. No code from the directory is run.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as exc:
        raise ModelError(
            f"model.source = {source_uri!r} is a model of transformers, which is not installed: "
            "pip install 'penstock[trainer]'."
        ) from exc
    try:
        told = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"transformers cannot load {source_uri}: {exc}") from exc
    sees_images = type(told) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        told,
        transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM,
    )


def _from_transformers(directory: Path, source_uri: str, seed: int) -> nn.Module:
    """Whatever model transformers makes of it; no code from the directory and no pickle is run."""
    _, auto = in_transformers(directory, source_uri)
    try:
        with _seeded(seed):
            model, loaded = auto.from_pretrained(
                directory,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"transformers cannot load {source_uri}: {exc}") from exc
    _require_all_loaded(loaded, source_uri)
    return cast("nn.Module", model.train())


def _require_all_loaded(loaded: Mapping[str, Any], source_uri: str) -> None:
    # transformers warns and goes on, with random weights in the place of missing ones.
    found = {
        what: sorted(map(str, loaded[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")
    }
    if any(found.values()):
        told = "; ".join(f"{what} {', '.join(names[:5])}" for what, names in found.items() if names)
        raise ModelError(f"{source_uri}: the weights are not those of config.json: {told}.")


def _from_function(config: ModelConfig, seed: int) -> nn.Module:
    _refuse_dropout(config)
    with _seeded(seed):
        model = call_user_function(
            config.source,
            config.options,
            section="model",
            or_else="empty, a Hugging Face directory (gs://, file:// or an absolute path), or ",
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{config.source} returned {type(model).__name__}; it must return the torch.nn.Module to train."
        )
    for name, weight in model.named_parameters():
        if (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            raise ModelError(
                f"{config.source} returned a model whose {name} is {weight.dtype} on {weight.device}; it must be "
                "torch.float32 on cpu. Device and precision are the engine's to choose (engine.precision)."
            )
    return model.train()


def _refuse_dropout(config: ModelConfig) -> None:
    if config.dropout:
        raise ModelError(
            f"model.dropout = {config.dropout} with model.source = {config.source!r}: dropout is of the built-in "
            "decoder only. Set it to 0."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's generator on CPU begins at `seed`, and is afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
