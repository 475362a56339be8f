"""A staged dataset small enough for tests: a byte-level BPE and token shards of some of the standard library's text."""

from __future__ import annotations

import hashlib
import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from penstock_trainer.contract.dataset import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TOKEN_COUNTS_NAME,
    TOKENIZER_NAME,
    DatasetManifest,
    DatasetObject,
    TokenizerInfo,
)
from penstock_trainer.storage import crc32c

VOCAB_SIZE = 320
EOS = "<|endoftext|>"


def build_dataset(directory: Path, *, num_shards: int = 3, max_tokens: int | None = None) -> str:
    """Write a dataset and return its file:// URI. `max_tokens` cuts the train split short."""
    train, held_out = _documents()
    tokenizer = _train_tokenizer(train)
    eos_id = tokenizer.token_to_id(EOS)
    ids = [token for text in train for token in [*tokenizer.encode(text).ids, eos_id]][:max_tokens]
    shards = [
        _write(directory, f"train/shard-{index:05d}.tokens", part.astype("<u2").tobytes(), tokens=len(part))
        for index, part in enumerate(np.array_split(np.array(ids), num_shards))
    ]
    counts = np.bincount(ids, minlength=tokenizer.get_vocab_size()).astype("<u8")
    lines = [json.dumps({"id": str(index), "text": text}) for index, text in enumerate(held_out)]
    encoded_tokenizer = tokenizer.to_str().encode()
    _write(directory, TOKENIZER_NAME, encoded_tokenizer)
    manifest = DatasetManifest(
        format_version=FORMAT_VERSION,
        token_type="uint16",
        tokenizer=TokenizerInfo(
            sha256=hashlib.sha256(encoded_tokenizer).hexdigest(),
            vocab_size=tokenizer.get_vocab_size(),
            eos_id=eos_id,
        ),
        train=tuple(shards),
        evaluation=(
            _write(
                directory,
                "eval/documents-00000.jsonl",
                "".join(line + "\n" for line in lines).encode(),
                documents=len(held_out),
                text_bytes=sum(len(text.encode()) for text in held_out),
            ),
        ),
        token_counts=_write(directory, TOKEN_COUNTS_NAME, counts.tobytes()),
        sources=(),
        filters={},
    )
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return directory.as_uri()


def _documents() -> tuple[Sequence[str], Sequence[str]]:
    """Train documents, and held-out ones: a short one, one of several windows, and one that is not ASCII."""
    held_out = [inspect.getsource(textwrap.dedent), inspect.getsource(textwrap.TextWrapper._wrap_chunks)]
    return (
        [inspect.getsource(module) for module in (textwrap, json, json.decoder, inspect)],
        [*held_out, "Stäbe, Flüsse und Türme: 水の管\n"],
    )


def _train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write(
    directory: Path, name: str, data: bytes, *, tokens: int = 0, documents: int = 0, text_bytes: int = 0
) -> DatasetObject:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return DatasetObject(
        name=name,
        size=len(data),
        crc32c=crc32c(data),
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
    )
