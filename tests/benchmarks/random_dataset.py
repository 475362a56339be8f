"""A staged dataset of random tokens: a benchmark needs a vocabulary of a given size and no language."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from penstock_trainer.contract.dataset import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TOKEN_COUNTS_NAME,
    DatasetManifest,
    DatasetObject,
    TokenizerInfo,
    token_type_for,
)
from penstock_trainer.storage import crc32c


def build_dataset(directory: Path, *, vocab_size: int, num_tokens: int) -> str:
    """Write one train shard, and return the dataset's file:// URI. There is no tokenizer, so it cannot be exported."""
    token_type = token_type_for(vocab_size)
    tokens = np.random.default_rng(0).integers(vocab_size, size=num_tokens, dtype=token_type)
    counts = np.bincount(tokens, minlength=vocab_size).astype("<u8")
    manifest = DatasetManifest(
        format_version=FORMAT_VERSION,
        token_type=token_type,
        tokenizer=TokenizerInfo(sha256=hashlib.sha256().hexdigest(), vocab_size=vocab_size, eos_id=0),
        train=(_write(directory, "train/shard-00000.tokens", tokens.tobytes(), tokens=num_tokens),),
        evaluation=(),
        token_counts=_write(directory, TOKEN_COUNTS_NAME, counts.tobytes()),
        sources=(),
        filters={},
    )
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return directory.as_uri()


def _write(directory: Path, name: str, data: bytes, *, tokens: int = 0) -> DatasetObject:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return DatasetObject(
        name=name, size=len(data), crc32c=crc32c(data), documents=0, tokens=tokens, text_bytes=0
    )
