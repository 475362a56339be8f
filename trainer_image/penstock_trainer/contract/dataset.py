"""The staged dataset: token shards, held-out documents, the tokenizer, and the manifest that is written last.

    <dataset>/tokenizer.json               Hugging Face tokenizers format
    <dataset>/train/shard-00000.tokens     little-endian token ids, documents one after another, each ended by eos_id
    <dataset>/train/token_counts.u64       how often each id occurs in the train split (little-endian uint64)
    <dataset>/eval/documents-00000.jsonl   the held-out documents as text: {"id", "text"}
    <dataset>/manifest.json                written last; a directory without it is not a dataset

Held-out documents stay text, so that two models with different tokenizers can be scored on the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock_trainer.contract.fields import canonical_json, parse_json, require, require_version

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
TOKEN_COUNTS_NAME = "train/token_counts.u64"  # noqa: S105  # a file name, not a secret

TokenType = Literal["uint16", "uint32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetObject:
    """One object of the dataset. `name` is its path under the dataset directory."""

    name: str
    size: int
    """Bytes."""
    crc32c: str
    """Base64 of the big-endian CRC32C, as Cloud Storage reports it."""
    documents: int
    tokens: int
    """Token ids in it, end-of-document ids included; 0 for a file of documents."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One input object, pinned."""

    uri: str
    generation: int
    size: int
    crc32c: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """The tokenizer that made the shards."""

    sha256: str
    """Hex digest of tokenizer.json."""
    vocab_size: int
    eos_id: int
    """Ends every document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """What a reader may rely on; every object is pinned by size and CRC32C."""

    format_version: int
    token_type: TokenType
    tokenizer: TokenizerInfo
    train: tuple[DatasetObject, ...]
    """Token shards, in reading order."""
    evaluation: tuple[DatasetObject, ...]
    """Files of held-out documents."""
    token_counts: DatasetObject
    sources: tuple[Source, ...]
    filters: Mapping[str, int]
    """Documents dropped, by reason."""

    def __post_init__(self) -> None:
        require_version(
            self.format_version,
            FORMAT_VERSION,
            "dataset",
            "stage the data again with this version of penstock",
        )
        require(bool(self.train), "train", self.train, "at least one shard")

    @property
    def train_tokens(self) -> int:
        """Token ids of the train split."""
        return sum(shard.tokens for shard in self.train)

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> DatasetManifest:
        """Raises ContractError: not JSON, another format version, or a field that is missing or ill-typed."""
        return parse_json(cls, text, "the dataset manifest")


def token_type_for(vocab_size: int) -> TokenType:
    """The narrowest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"
