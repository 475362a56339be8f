"""The trained model as a Hugging Face directory; see penstock_trainer.contract.export.

`transformers.AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load it as it is.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from penstock_trainer.checkpoints.commit import write_object
from penstock_trainer.checkpoints.ownership import replace_as_owner
from penstock_trainer.contract.checkpoint import CheckpointObject
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.contract.dataset import TOKENIZER_NAME, DatasetManifest
from penstock_trainer.contract.export import MANIFEST_NAME, METRICS_NAME, ExportManifest
from penstock_trainer.data.held_out import read_tokenizer
from penstock_trainer.errors import ExportError, ModelError
from penstock_trainer.model.buffers import persistent_buffers
from penstock_trainer.model.build import build_model
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import WEIGHTS_NAME, hf_config, hf_name
from penstock_trainer.model.source_directory import CONFIG_NAME, is_directory
from penstock_trainer.storage import ObjectNotFoundError, Storage, join, storage_for

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


def write_export(
    export_uri: str,
    *,
    weights: Mapping[str, Tensor],
    model: nn.Module,
    seq_len: int,
    dataset_uri: str,
    dataset: DatasetManifest | None,
    metrics: bytes,
    manifest_of: Callable[[tuple[CheckpointObject, ...]], ExportManifest],
    check_owner: Callable[[], None],
) -> None:
    """Write an export, its manifest last. Blocks on storage. What stands there is replaced.

    `model` says what the weights are of; its own may be sharded by now. The built-in decoder is exported as its family
    of Hugging Face's, another model under its own names, with its own config where it is one of transformers'. Without a
    `dataset` there is no tokenizer to export.

    Before each change `check_owner` raises if another attempt has taken the run over; what that one has written is left
    as it is, see `replace_as_owner`. Raises what it raises, StorageError, and DatasetError when the dataset's tokenizer
    is not the one its manifest names.
    """
    storage = storage_for(export_uri)
    manifest_uri = join(export_uri, MANIFEST_NAME)

    def withdraw(generation: int) -> None:
        if generation:
            with suppress(ObjectNotFoundError):
                storage.delete(manifest_uri, if_generation_match=generation)

    def write(name: str, data: bytes) -> CheckpointObject:
        return replace_as_owner(
            storage,
            join(export_uri, name),
            check_owner,
            lambda generation: write_object(
                storage, export_uri, name, data, _content_type(name), if_generation_match=generation
            ),
        )

    # While objects are replaced, the directory is no export.
    replace_as_owner(storage, manifest_uri, check_owner, withdraw)
    rename = hf_name if isinstance(model, Decoder) else str
    named = {rename(name): weight for name, weight in weights.items()}
    files = {
        WEIGHTS_NAME: safetensors.torch.save(named, metadata={"format": "pt"}),
        CONFIG_NAME: _json(_config_of(model, seq_len=seq_len, dataset=dataset)),
        **(_tokenizer_files(dataset_uri, dataset, seq_len) if dataset else {}),
        METRICS_NAME: metrics,
    }
    objects = tuple(write(name, data) for name, data in files.items())
    write(MANIFEST_NAME, manifest_of(objects).to_json().encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """How a model of text is to be read to."""

    tokenizer: Tokenizer
    eos_id: int
    """Ends every document."""
    seq_len: int
    """Tokens that it has seen at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An exported model, read back."""

    model: nn.Module
    """In fp32 on CPU."""
    config: dict[str, Any]
    """config.json."""
    manifest: ExportManifest
    text: TextFormat | None
    """None: it was not trained on token shards, so no tokenizer was exported."""


def read_export(export_uri: str) -> Export:
    """The export, each object of it verified against the manifest.

    The model is the built-in decoder, one of transformers' (no code and no pickle of the export is run), or what the
    user's function of ExportManifest.config returns, with the exported weights. Blocks on storage, and keeps a copy on
    this machine's disk meanwhile. Raises ExportError for a directory without a manifest and for an object that is not the
    one that was written, ContractError for a manifest that is none, ModelError for a model that cannot be built or whose
    weights are others, UserFunctionError for a function that cannot be called, and StorageError.
    """
    storage = storage_for(export_uri)
    try:
        manifest = ExportManifest.from_json(storage.read(join(export_uri, MANIFEST_NAME)))
    except ObjectNotFoundError as exc:
        raise ExportError(
            f"{export_uri} is not an exported model: it has no {MANIFEST_NAME}, which is written last. "
            "Give the directory that training exported to."
        ) from exc
    entries = {entry.name: entry for entry in manifest.objects}
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        directory = Path(temporary)
        of_text = [name for name in (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME) if name in entries]
        for name in (WEIGHTS_NAME, CONFIG_NAME, *of_text):
            (directory / name).write_bytes(_read(storage, export_uri, entries, name))
        return Export(
            model=_model(directory, manifest, export_uri),
            config=json.loads((directory / CONFIG_NAME).read_bytes()),
            manifest=manifest,
            text=_text_format(directory),
        )


def _model(directory: Path, manifest: ExportManifest, export_uri: str) -> nn.Module:
    trained: Mapping[str, Any] = manifest.config.get("model", {})
    source = trained.get("source", "")
    if not source or is_directory(source):
        copy = ModelConfig(source=str(directory), native=trained.get("native", True))
        try:
            return build_model(copy, vocab_size=None, seed=0)
        except ModelError as exc:
            raise ModelError(str(exc).replace(str(directory), export_uri)) from exc
    model = build_model(ModelConfig(source=source, options=trained["options"]), vocab_size=None, seed=0)
    weights = safetensors.torch.load_file(directory / WEIGHTS_NAME)
    state = {**dict(model.named_parameters()), **persistent_buffers(model)}
    expected = {name: weight.shape for name, weight in state.items()}
    found = {name: weight.shape for name, weight in weights.items()}
    if other := dict(expected.items() ^ found.items()):
        raise ModelError(
            f"{source} returns a model of other weights than were exported: {', '.join(sorted(other))} differ in name or "
            "shape. Give the code that the model was trained with."
        )
    model.load_state_dict(weights, strict=False)  # a tied weight is exported once
    return model


def _text_format(directory: Path) -> TextFormat | None:
    if not (directory / TOKENIZER_NAME).exists():
        return None
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
    told = json.loads((directory / TOKENIZER_CONFIG_NAME).read_bytes())
    eos_id = tokenizer.token_to_id(told["eos_token"])
    assert eos_id is not None, "an export names the end-of-document token as its own tokenizer does"
    return TextFormat(tokenizer=tokenizer, eos_id=eos_id, seq_len=told["model_max_length"])


def _config_of(model: nn.Module, *, seq_len: int, dataset: DatasetManifest | None) -> dict[str, Any]:
    if isinstance(model, Decoder):
        eos_id = dataset.tokenizer.eos_id if dataset else None
        return hf_config(model.config, vocab_size=model.vocab_size, seq_len=seq_len, eos_id=eos_id)
    config: Any = getattr(model, "config", None)
    told: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return {"architectures": [type(model).__name__], **told}


def _tokenizer_files(dataset_uri: str, dataset: DatasetManifest, seq_len: int) -> dict[str, bytes]:
    tokenizer = read_tokenizer(dataset_uri, dataset)
    told = _tokenizer_config(tokenizer, dataset.tokenizer.eos_id, seq_len)
    return {TOKENIZER_NAME: tokenizer, TOKENIZER_CONFIG_NAME: _json(told)}


def _tokenizer_config(tokenizer: bytes, eos_id: int, seq_len: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": Tokenizer.from_str(tokenizer.decode()).id_to_token(eos_id),
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }


def _read(storage: Storage, uri: str, entries: Mapping[str, CheckpointObject], name: str) -> bytes:
    data = storage.read(join(uri, name))
    expected = entries[name].sha256 if name in entries else None
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ExportError(
            f"{join(uri, name)} is not what was exported: expected sha256 {expected}, found {found}."
        )
    return data


def _content_type(name: str) -> str:
    return "application/json" if name.endswith(".json") else "application/octet-stream"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
