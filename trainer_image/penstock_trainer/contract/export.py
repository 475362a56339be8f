"""The exported model: a Hugging Face directory with a manifest that is written last.

<model>/model.safetensors   weights under the names of the family's Hugging Face class
<model>/config.json         LlamaForCausalLM, or the class of another family
<model>/tokenizer.json      the dataset's tokenizer, byte for byte
<model>/tokenizer_config.json
<model>/metrics.jsonl       one line a logged step and one an evaluation of the whole run, see events.measurements_to_jsonl
<model>/manifest.json       written last
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock_trainer.contract.checkpoint import CheckpointObject
from penstock_trainer.contract.fields import canonical_json, parse_json, require_version

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportManifest:
    """What the export holds and where it comes from."""

    format_version: int
    step: int
    """Optimizer steps that the weights have seen; the run may have gone on after its best."""
    tokens_seen: int
    """Targets that were trained on until then."""
    num_parameters: int
    """Trainable parameters, a tied head counted once."""
    config: Mapping[str, Any]
    """The JobConfig that trained it, as JSON types."""
    config_hash: str
    dataset_uri: str
    world_size: int
    """Ranks of the attempt that finished."""
    attempt: str
    checkpoint_uri: str
    """Step directory of the checkpoint with the same weights."""
    objects: tuple[CheckpointObject, ...]
    """Every object but this manifest; names are paths under the export's directory."""

    def __post_init__(self) -> None:
        require_version(
            self.format_version,
            FORMAT_VERSION,
            "export",
            "use a penstock that is at least as new as the one that wrote it",
        )

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> ExportManifest:
        """Raises ContractError: not JSON, another format version, or a field that is missing or ill-typed."""
        return parse_json(cls, text, "the export manifest")
