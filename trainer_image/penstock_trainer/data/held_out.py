"""The held-out text of a staged dataset, cut into what a model scores.

Every token of every document is scored, and the end-of-document token after it. Each document is seen from an empty
context, which for these models is the end of the document before: its first token is conditioned on the end-of-document
token alone. A document longer than seq_len is cut into windows of seq_len targets; the first target of a window is
conditioned on the token before it alone. So every token is scored exactly once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from tokenizers import Tokenizer

from penstock_trainer.contract.dataset import TOKENIZER_NAME, DatasetManifest, DatasetObject
from penstock_trainer.errors import DatasetError
from penstock_trainer.model.objective import IGNORED, Batch
from penstock_trainer.storage import crc32c, join, storage_for

Window = Sequence[int]
"""One token of context, then the targets."""

_ENCODED_AT_ONCE = 256
"""Documents."""


def held_out_documents(dataset_uri: str, manifest: DatasetManifest) -> Iterator[str]:
    """The held-out documents in order. Blocks on storage, a file at a time.

    Raises DatasetError when an object is not what the manifest says, and StorageError.
    """
    for entry in manifest.evaluation:
        # Lines of bytes: text has more kinds of line ends than JSON Lines.
        for line in read_object(dataset_uri, entry).splitlines():
            yield json.loads(line)["text"]


def read_object(dataset_uri: str, entry: DatasetObject) -> bytes:
    """An object of the dataset. Blocks on storage; raises DatasetError when it is not what the manifest says."""
    uri = join(dataset_uri, entry.name)
    data = storage_for(uri).read(uri)
    if (len(data), crc32c(data)) != (entry.size, entry.crc32c):
        raise DatasetError(
            f"{uri} is corrupt: expected {entry.size} bytes with crc32c {entry.crc32c}, "
            f"found {len(data)} bytes with crc32c {crc32c(data)}. Stage the data again."
        )
    return data


def read_tokenizer(dataset_uri: str, manifest: DatasetManifest) -> bytes:
    """tokenizer.json. Blocks on storage; raises DatasetError when it is not the one that the manifest names."""
    uri = join(dataset_uri, TOKENIZER_NAME)
    data = storage_for(uri).read(uri)
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.tokenizer.sha256:
        raise DatasetError(
            f"{uri} is corrupt: expected sha256 {manifest.tokenizer.sha256}, found {found}. Stage the data again."
        )
    return data


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str], eos_id: int) -> Iterator[list[int]]:
    """The tokens of each document with the end-of-document token after them, as staging makes them."""
    # A literal special token inside a document is ordinary text, and nothing is cut or filled up.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    documents = iter(documents)
    while some := list(itertools.islice(documents, _ENCODED_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield [*encoding.ids, eos_id]


def windows_of(tokens: Sequence[int], seq_len: int) -> Iterator[Window]:
    """Cut a document, which begins with its context token, into windows of at most seq_len targets."""
    for start in range(0, len(tokens) - 1, seq_len):
        yield tokens[start : start + seq_len + 1]


def held_out_windows(
    tokenizer: Tokenizer, documents: Iterable[str], *, eos_id: int, seq_len: int
) -> Iterator[Window]:
    """The windows of all documents in order."""
    for tokens in encode_documents(tokenizer, documents, eos_id):
        yield from windows_of([eos_id, *tokens], seq_len)


def by_length(windows: Iterable[Window]) -> list[Window]:
    """The longest first: windows of like length share a batch, so that little is padded."""
    return sorted(windows, key=len, reverse=True)


def batch_of(windows: Sequence[Window]) -> Batch:
    """`input_ids` and `labels`, int64 [windows, targets of the longest]; labels IGNORED where a shorter one is padded.

    Padding is to the right of every token that counts, where causal attention does not look.
    """
    longest = max(map(len, windows)) - 1
    input_ids = torch.zeros(len(windows), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, window in enumerate(windows):
        input_ids[row, : len(window) - 1] = torch.tensor(window[:-1])
        labels[row, : len(window) - 1] = torch.tensor(window[1:])
    return {"input_ids": input_ids, "labels": labels}
