"""The decoder's shape and weights as Hugging Face writes them, in both directions.

What is absent from a config.json has the default of transformers 5's config of that family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock_trainer.contract.config import ModelConfig, RopeScaling
from penstock_trainer.contract.sections.model import Family, RopeKind
from penstock_trainer.errors import ModelError
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.rotary import yarn_attention_factor
from penstock_trainer.model.source_directory import CONFIG_NAME, source_directory

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
_COVERED: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Fields that change what the model computes, and the values that the decoder knows."""
_COVERED_ROPE: Mapping[RopeKind | None, Sequence[str]] = {
    None: (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}
_LISTED = 5
"""Names of weights that a message gives; of the rest it gives the number."""


def hf_config(config: ModelConfig, *, vocab_size: int, seq_len: int, eos_id: int | None) -> dict[str, Any]:
    """config.json of the family's ...ForCausalLM of the same shape."""
    told: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.dims_per_head,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads rope_parameters, vLLM and transformers 4 rope_theta and rope_scaling.
        "rope_theta": config.rope_theta,
        "rope_parameters": {**_rope_scaling(config.rope_scaling), "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "bos_token_id": eos_id,  # a document begins after the end of the one before
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }
    if config.rope_scaling is not None:
        told["rope_scaling"] = _rope_scaling(config.rope_scaling)
    if config.family == "mistral":
        told["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        told["use_sliding_window"] = False
    if config.family in ("llama", "qwen3"):
        told["attention_bias"] = False
    if config.family == "llama":
        told["mlp_bias"] = False
    return told


def model_config(told: Mapping[str, Any], *, where: str = CONFIG_NAME, dropout: float = 0.0) -> ModelConfig:
    """The decoder's config for a config.json that lies at `where`; the inverse of `hf_config`.

    Raises ModelError for what the decoder does not cover, a field that is missing, and a value that does not fit.
    """
    if not covers(told):
        raise _uncovered(where, [f"model_type = {told.get('model_type')!r}"])
    family = cast("Family", told["model_type"])
    told = {**_DEFAULTS[family], **told}
    rope = told.get("rope_scaling") or told.get("rope_parameters") or {}
    kind = _rope_kind(rope, where)
    if problems := [*_uncovered_fields(told, family), *_uncovered_rope(rope, kind)]:
        raise _uncovered(where, problems)
    try:
        num_heads = told["num_attention_heads"]
        derived = told["hidden_size"] // num_heads
        head_dim = told.get("head_dim") or derived
        is_derived = head_dim == derived and told["hidden_size"] % num_heads == 0
        return ModelConfig(
            family=family,
            dim=told["hidden_size"],
            num_layers=told["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=told.get("num_key_value_heads") or num_heads,
            head_dim=None if is_derived else head_dim,
            ffn_dim=told["intermediate_size"],
            rope_theta=rope.get("rope_theta") or told.get("rope_theta") or 10000.0,
            rope_scaling=_scaling(rope, kind, told) if kind else None,
            sliding_window=told.get("sliding_window") if family == "mistral" else None,
            norm_eps=told.get("rms_norm_eps", 1e-6),
            tie_embeddings=told.get("tie_word_embeddings", False),
            dropout=dropout,
        )
    except KeyError as exc:
        raise ModelError(f"{where} has no {exc.args[0]}, without which the model has no shape.") from exc
    except (TypeError, ValueError) as exc:
        raise ModelError(f"{where} does not describe a model: {exc}") from exc


def covers(told: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family of the built-in decoder."""
    return told.get("model_type") in get_args(Family)


def hf_name(name: str) -> str:
    """A weight's name in ...ForCausalLM."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def read_config(directory: Path, *, source_uri: str) -> dict[str, Any]:
    """config.json of a directory that came from `source_uri`. Raises ModelError when it is not a JSON object."""
    try:
        told = json.loads((directory / CONFIG_NAME).read_bytes())
    except ValueError as exc:
        raise ModelError(f"{source_uri}/{CONFIG_NAME} is not JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise ModelError(f"{source_uri}/{CONFIG_NAME} is not a JSON object.")
    return told


def read_pretrained(source_uri: str, *, dropout: float = 0.0) -> Decoder:
    """The decoder of a Hugging Face directory (gs://, file:// or an absolute path), in fp32 on CPU.

    Blocks on storage. Raises ModelError: no config.json, a config that the decoder does not cover (see `model_config`),
    weights that are missing, unexpected or of another shape, no safetensors; and StorageError.
    """
    with source_directory(source_uri) as directory:
        return load_directory(directory, source_uri=source_uri, dropout=dropout)


def load_directory(directory: Path, *, source_uri: str, dropout: float = 0.0) -> Decoder:
    """As `read_pretrained`, of a directory on disk that came from `source_uri`."""
    told = read_config(directory, source_uri=source_uri)
    config = model_config(told, where=f"{source_uri}/{CONFIG_NAME}", dropout=dropout)
    if not isinstance(told.get("vocab_size"), int):
        raise ModelError(
            f"{source_uri}/{CONFIG_NAME} has no vocab_size, without which the model has no shape."
        )
    model = Decoder(config, told["vocab_size"])
    _fill(model, _weights(directory, source_uri), source_uri)
    return model


@torch.no_grad()
def _fill(model: Decoder, weights: Iterator[tuple[str, Tensor]], source_uri: str) -> None:
    """Copy every weight into its place, one at a time, so that no second model is in memory."""
    expected = {hf_name(name): weight for name, weight in model.named_parameters()}
    missing, unexpected, tied_head = set(expected), [], None
    for name, given in weights:
        if name == "lm_head.weight" and model.config.tie_embeddings:
            tied_head = given
        elif name.endswith("rotary_emb.inv_freq"):  # old checkpoints keep what follows from the config
            continue
        elif name not in expected:
            unexpected.append(name)
        else:
            _copy(expected[name], given, name=name, source_uri=source_uri)
            missing.discard(name)
    if missing or unexpected:
        raise ModelError(_difference(source_uri, missing, unexpected))
    embedding = model.embed_tokens.weight
    if tied_head is not None and not torch.equal(tied_head.to(embedding.dtype), embedding):
        raise ModelError(
            f"{source_uri}: lm_head.weight is not the token embedding, but {CONFIG_NAME} ties them "
            "(tie_word_embeddings = true). Set it to false there, or remove lm_head.weight."
        )


def _copy(weight: Tensor, given: Tensor, *, name: str, source_uri: str) -> None:
    if given.shape != weight.shape:
        raise ModelError(
            f"{source_uri}: {name} has the shape {list(given.shape)}, expected {list(weight.shape)} by {CONFIG_NAME}. "
            "Weights and config are of different models."
        )
    if given.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ModelError(
            f"{source_uri}: {name} is {given.dtype}; allowed are float16, bfloat16, float32 and float64. "
            "Give the weights as they were before quantization."
        )
    weight.copy_(given)


def _difference(source_uri: str, missing: set[str], unexpected: Sequence[str]) -> str:
    parts = [
        f"{what} {_some(sorted(names))}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    message = f"{source_uri}: the weights are not those of {CONFIG_NAME}: {'; '.join(parts)}."
    if "lm_head.weight" in missing:
        message += f" A head that is the token embedding needs tie_word_embeddings = true in {CONFIG_NAME}."
    return message


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _weights(directory: Path, source_uri: str) -> Iterator[tuple[str, Tensor]]:
    """Every weight with Hugging Face's name, read when its turn comes."""
    for name in _files(directory, source_uri):
        try:
            with safe_open(directory / name, framework="pt") as file:
                for weight_name in file.keys():  # noqa: SIM118  # not a mapping
                    yield weight_name, file.get_tensor(weight_name)
        except FileNotFoundError as exc:
            raise ModelError(f"{source_uri}/{INDEX_NAME} names {name}, which is not there.") from exc
        except SafetensorError as exc:
            raise ModelError(f"{source_uri}/{name} is not a whole safetensors file: {exc}") from exc


def _files(directory: Path, source_uri: str) -> list[str]:
    if (directory / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    try:
        weight_map = json.loads((directory / INDEX_NAME).read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except FileNotFoundError as exc:
        raise ModelError(
            f"{source_uri} has neither {WEIGHTS_NAME} nor {INDEX_NAME}. Pickled weights (.bin, .pt) are not read: "
            "save the model with save_pretrained of transformers 4.35 or later."
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelError(f"{source_uri}/{INDEX_NAME} is not an index of safetensors files: {exc}") from exc
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{source_uri}/{INDEX_NAME} names {name!r}, which is not a file beside it.")
    return names


def _uncovered(where: str, problems: Sequence[str]) -> ModelError:
    return ModelError(
        f"{where}: the built-in decoder does not cover {', '.join(problems)}. "
        f"It covers {', '.join(get_args(Family))}. Set model.native = false to train transformers' own model."
    )


def _uncovered_fields(told: Mapping[str, Any], family: Family) -> Iterator[str]:
    for name, covered in _COVERED.items():
        if name == "attention_bias" and family == "qwen2":
            continue  # transformers does not read it: qwen2 has its biases always
        if told.get(name, covered[0]) not in covered:
            yield f"{name} = {told[name]!r}"
    layer_types = told.get("layer_types") or ()
    if set(layer_types) - {"full_attention"}:
        yield f"layer_types = {sorted(set(layer_types))!r}"
    architectures = told.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        yield f"architectures = {architectures!r}"


def _uncovered_rope(rope: Mapping[str, Any], kind: RopeKind | None) -> Iterator[str]:
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_COVERED_ROPE[kind])
    for name, value in rope.items():
        if name not in known and value is not None:
            yield f"rope {name} = {value!r}"
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        yield f"partial_rotary_factor = {rope['partial_rotary_factor']!r}"
    if rope.get("truncate", True) is not True:
        yield f"rope truncate = {rope['truncate']!r}"
    given = rope.get("attention_factor")
    if given is not None and given != yarn_attention_factor(rope.get("factor") or 1):
        yield f"rope attention_factor = {given!r} (other than 0.1 ln(factor) + 1)"


def _rope_kind(rope: Mapping[str, Any], where: str) -> RopeKind | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in get_args(RopeKind):
        raise _uncovered(where, [f"rope_type = {kind!r}"])
    return cast("RopeKind", kind)


def _scaling(rope: Mapping[str, Any], kind: RopeKind, told: Mapping[str, Any]) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope["factor"])
    original = (
        told.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or told["max_position_embeddings"]
    )
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=rope["factor"],
            original_max_position=original,
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
        )
    return RopeScaling(
        kind=kind,
        factor=rope["factor"],
        original_max_position=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
    )


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """As config.json has it, without theta."""
    if scaling is None:
        return {"rope_type": "default"}
    told = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    return {
        name: value for name, value in told.items() if name in ("rope_type", *_COVERED_ROPE[scaling.kind])
    }
