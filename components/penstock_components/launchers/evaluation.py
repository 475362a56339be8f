"""What evaluate tells gate: the scores of the challenger, the champion and the unigram baseline on the same documents."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass, fields

from penstock_trainer.contract.fields import canonical_json, from_dict, load_json, parse_json, require_version

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Unigram:
    """The best predictor that knows only how often each token occurs in the train split."""

    bits_per_byte: float | None
    """None: not a finite number, here and below."""
    loss: float | None
    """Nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScore:
    """One model on the held-out documents, read with its own tokenizer."""

    uri: str
    bits_per_byte: float | None
    """Comparable between models with different tokenizers; smaller is better."""
    loss: float | None
    """Nats per token."""
    perplexity: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What is used of what the scorer writes: models in the order in which they were given."""

    documents: int
    bytes: int
    """UTF-8 bytes of the documents."""
    unigram: Unigram
    models: tuple[ModelScore, ...]

    @classmethod
    def from_json(cls, text: str | builtins.bytes) -> Scores:
        """Raises ContractError. Further fields of a model's score are its scorer's own affair."""
        told = _finite(load_json(text, "the scorer's output"))
        if isinstance(told, dict):
            used = {field.name for field in fields(ModelScore)}
            models = told.get("models", [])
            told["models"] = [{key: score[key] for key in score if key in used} for score in models]
        return from_dict(cls, told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The evaluation artifact."""

    format_version: int = FORMAT_VERSION
    dataset_uri: str
    documents: int
    bytes: int
    unigram: Unigram
    challenger: ModelScore
    champion: ModelScore | None
    """None: the registry has no version with the alias `champion`."""
    champion_name: str
    """Resource name of the champion's version, or empty."""

    def __post_init__(self) -> None:
        require_version(
            self.format_version,
            FORMAT_VERSION,
            "evaluation",
            "evaluate the model again with this version of penstock",
        )

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | builtins.bytes) -> Evaluation:
        """Raises ContractError."""
        return parse_json(cls, text, "the evaluation")


def improvement(value: float | None, reference: float | None) -> float | None:
    """By what share `value` is below `reference`; None unless both are finite and the reference is positive."""
    if value is None or reference is None or not (math.isfinite(value) and math.isfinite(reference)):
        return None
    return 1 - value / reference if reference > 0 else None


def _finite(value: object) -> object:
    """Python's json writes NaN and Infinity, which JSON does not have: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
