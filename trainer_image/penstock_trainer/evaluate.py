"""Score exported models on the same held-out documents, each with its own tokenizer, in bits per byte.

    python -m penstock_trainer.evaluate --data=<dataset> --model=<export> [--model=<export> ...] --output=<path.json>
        [--max-bytes=N] [--batch=N]

What is summed is the negative log-likelihood of every token of every document and of the end-of-document token after it.
Each document is seen from an empty context, which for these models is the end of the document before: its first token is
conditioned on the end-of-document token alone. A document longer than seq_len is cut into windows of seq_len targets;
the first target of a window is conditioned on the token before it alone. So every token is scored exactly once.

Bits per byte divide that sum by ln 2 and by the UTF-8 bytes of the documents' text, so tokenizers compare.

Shape suffixes: B windows, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from penstock_trainer.contract.dataset import TOKENIZER_NAME, DatasetManifest, DatasetObject
from penstock_trainer.contract.events import ProgressEvent
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.errors import DatasetError, TrainerError
from penstock_trainer.export import read_export
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.storage import StorageError, crc32c, join, storage_for

logger = logging.getLogger(__name__)

_IGNORED = -100
"""Target of a padded position."""
_LARGEST_EXPONENT = 700.0  # of a diverged model: exp() of more than 709 overflows
_PROGRESS_SECONDS = 5.0

Window = Sequence[int]
"""One token of context, then the targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScore:
    """One model on all documents."""

    uri: str
    bits_per_byte: float
    loss: float
    """Nats per token of its own tokenizer."""
    perplexity: float
    """exp(loss)."""
    tokens: int
    """End-of-document tokens included."""
    documents: int
    bytes: int


def evaluate(
    dataset_uri: str, model_uris: Sequence[str], *, max_bytes: int | None, batch: int
) -> dict[str, Any]:
    """The report, as JSON types. Blocks until all models are scored.

    Raises DatasetError or ExportError for an object that is not what its manifest says or a dataset without held-out
    text, ContractError for an export whose manifest is not one, and StorageError.
    """
    manifest = read_manifest(dataset_uri)
    documents = read_documents(dataset_uri, manifest, max_bytes=max_bytes)
    num_bytes = sum(len(document.encode()) for document in documents)
    unigram_nll, unigram_tokens = unigram_score(dataset_uri, manifest, documents)
    return {
        "documents": len(documents),
        "bytes": num_bytes,
        "unigram": {
            "bits_per_byte": unigram_nll / math.log(2) / num_bytes,
            "loss": unigram_nll / unigram_tokens,
        },
        "models": [
            asdict(score_model(uri, documents, num_bytes=num_bytes, batch=batch)) for uri in model_uris
        ],
    }


def read_documents(dataset_uri: str, manifest: DatasetManifest, *, max_bytes: int | None) -> list[str]:
    """The held-out documents in order: all, or as many as fit into `max_bytes` of text, but at least one.

    Blocks on storage. Raises DatasetError when an object is not what the manifest says or there is no text, and
    StorageError.
    """
    documents: list[str] = []
    num_bytes = 0
    for document in _held_out(dataset_uri, manifest):
        num_bytes += len(document.encode())
        if documents and max_bytes is not None and num_bytes > max_bytes:
            break
        documents.append(document)
    if not any(documents):
        raise DatasetError(
            f"{dataset_uri} has no held-out text to evaluate on. Stage it with an evaluation share."
        )
    return documents


def unigram_score(dataset_uri: str, manifest: DatasetManifest, documents: Sequence[str]) -> tuple[float, int]:
    """(nats, tokens) under the train split's token frequencies with add-one smoothing: what no context at all gives.

    Blocks on storage. Raises DatasetError when the counts are not what the manifest says, and StorageError.
    """
    tokenizer = Tokenizer.from_str(storage_for(dataset_uri).read(join(dataset_uri, TOKENIZER_NAME)).decode())
    counts = np.frombuffer(_read(dataset_uri, manifest.token_counts), dtype="<u8").astype(np.float64) + 1
    nats = -np.log(counts / counts.sum())
    ids = [token for encoded in _encode(tokenizer, documents, manifest.tokenizer.eos_id) for token in encoded]
    return float(nats[ids].sum()), len(ids)


def score_model(uri: str, documents: Sequence[str], *, num_bytes: int, batch: int) -> ModelScore:
    """Load one export and score it on all documents, whose text is `num_bytes` of UTF-8. Blocks until it is scored.

    Raises ExportError when the export is not what its manifest says, ContractError when that is none, and StorageError.
    """
    model, config, tokenizer_json = read_export(uri)
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    eos_id, seq_len = config["eos_token_id"], config["max_position_embeddings"]
    encoded = _encode(tokenizer, documents, eos_id)
    windows = [window for tokens in encoded for window in windows_of([eos_id, *tokens], seq_len)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nll = score_windows(model.to(device).eval(), windows, batch=batch)
    tokens = sum(len(document) for document in encoded)
    return ModelScore(
        uri=uri,
        bits_per_byte=nll / math.log(2) / num_bytes,
        loss=nll / tokens,
        perplexity=math.exp(min(nll / tokens, _LARGEST_EXPONENT)),
        tokens=tokens,
        documents=len(documents),
        bytes=num_bytes,
    )


def windows_of(tokens: Sequence[int], seq_len: int) -> Iterator[Window]:
    """Cut a document, which begins with its context token, into windows of at most seq_len targets."""
    for start in range(0, len(tokens) - 1, seq_len):
        yield tokens[start : start + seq_len + 1]


@torch.inference_mode()
def score_windows(model: Decoder, windows: Sequence[Window], *, batch: int) -> float:
    """Nats of all targets. Windows of like length share a batch, so that little is padded."""
    device = next(model.parameters()).device
    total = sum(len(window) - 1 for window in windows)
    ordered = sorted(windows, key=len, reverse=True)
    nll = torch.zeros((), dtype=torch.float64, device=device)
    done, told_at = 0, time.monotonic()
    for start in range(0, len(ordered), batch):
        chosen = ordered[start : start + batch]
        inputs_BT = torch.zeros(len(chosen), len(chosen[0]) - 1, dtype=torch.int64)
        targets_BT = torch.full_like(inputs_BT, _IGNORED)
        for row, window in enumerate(chosen):
            inputs_BT[row, : len(window) - 1] = torch.tensor(window[:-1])
            targets_BT[row, : len(window) - 1] = torch.tensor(window[1:])
        # Padding is to the right of every token that counts, where causal attention does not look.
        logits_BTV = model(inputs_BT.to(device)).float()
        losses = cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.to(device).flatten(), ignore_index=_IGNORED, reduction="none"
        )
        nll += losses.double().sum()
        done += sum(len(window) - 1 for window in chosen)
        if done == total or time.monotonic() - told_at > _PROGRESS_SECONDS:
            told_at = time.monotonic()
            _say(ProgressEvent(done=done, total=total, unit="tokens"))
    return float(nll.item())


def _held_out(dataset_uri: str, manifest: DatasetManifest) -> Iterator[str]:
    for entry in manifest.evaluation:
        for line in _read(
            dataset_uri, entry
        ).splitlines():  # of bytes: text has more kinds of line ends than JSON Lines
            yield json.loads(line)["text"]


def _encode(tokenizer: Any, documents: Sequence[str], eos_id: int) -> list[list[int]]:
    # As staging does it: a literal special token inside a document is ordinary text, and nothing is cut or filled up.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encodings = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return [[*encoding.ids, eos_id] for encoding in encodings]


def _read(dataset_uri: str, entry: DatasetObject) -> bytes:
    uri = join(dataset_uri, entry.name)
    data = storage_for(uri).read(uri)
    if (len(data), crc32c(data)) != (entry.size, entry.crc32c):
        raise DatasetError(
            f"{uri} is corrupt: expected {entry.size} bytes with crc32c {entry.crc32c}, "
            f"found {len(data)} bytes with crc32c {crc32c(data)}. Stage the data again."
        )
    return data


def _say(event: ProgressEvent) -> None:
    sys.stdout.write(event.to_line() + "\n")
    sys.stdout.flush()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not valid: it must be at least 1")
    return value


def main(argv: Sequence[str]) -> int:
    """Evaluate as the command line says; 0, or 1 when it could not be done."""
    parser = argparse.ArgumentParser(prog="python -m penstock_trainer.evaluate", allow_abbrev=False)
    parser.add_argument("--data", required=True, help="dataset directory, gs:// or file://")
    parser.add_argument("--model", required=True, action="append", help="exported model, gs:// or file://")
    parser.add_argument("--output", required=True, type=Path, help="local file for the report, JSON")
    parser.add_argument("--max-bytes", type=_positive, help="score at most so much text (default: all)")
    parser.add_argument("--batch", type=_positive, default=16, help="windows at once (default: %(default)s)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        report = evaluate(
            arguments.data, arguments.model, max_bytes=arguments.max_bytes, batch=arguments.batch
        )
    except (TrainerError, StorageError, ContractError):
        logger.exception("evaluation failed")
        return 1
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
