"""Score exported models on the same held-out documents, each with its own tokenizer, in bits per byte.

    python -m penstock_trainer.evaluate --data=<dataset> --model=<export> [--model=<export> ...] --output=<path.json>
        [--max-bytes=N] [--batch=N]

What is summed is the negative log-likelihood of every token of every document and of the end-of-document token after it,
in the windows of penstock_trainer.data.held_out: those that evaluation inside of training scores too.

Bits per byte divide that sum by ln 2 and by the UTF-8 bytes of the documents' text, so tokenizers compare.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.events import ProgressEvent
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.data.held_out import (
    Window,
    batch_of,
    by_length,
    encode_documents,
    held_out_documents,
    read_object,
    read_tokenizer,
    windows_of,
)
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.errors import DatasetError, ExportError, TrainerError
from penstock_trainer.export import read_export
from penstock_trainer.model.objective import Objective
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.storage import StorageError

logger = logging.getLogger(__name__)

_LARGEST_EXPONENT = 700.0  # of a diverged model: exp() of more than 709 overflows
_PROGRESS_SECONDS = 5.0


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
    for document in held_out_documents(dataset_uri, manifest):
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

    Blocks on storage. Raises DatasetError when the counts or the tokenizer are not what the manifest says, and
    StorageError.
    """
    tokenizer = Tokenizer.from_str(read_tokenizer(dataset_uri, manifest).decode())
    counts = np.frombuffer(read_object(dataset_uri, manifest.token_counts), dtype="<u8").astype(np.float64)
    nats = -np.log((counts + 1) / (counts + 1).sum())
    encoded = encode_documents(tokenizer, documents, manifest.tokenizer.eos_id)
    ids = [token for tokens in encoded for token in tokens]
    return float(nats[ids].sum()), len(ids)


def score_model(uri: str, documents: Sequence[str], *, num_bytes: int, batch: int) -> ModelScore:
    """Load one export and score it on all documents, whose text is `num_bytes` of UTF-8. Blocks until it is scored.

    Raises ExportError when the export is not what its manifest says or has no tokenizer, what else `read_export` does,
    and StorageError.
    """
    export = read_export(uri)
    text = export.text
    if text is None:
        raise ExportError(
            f"{uri} has no tokenizer, and text cannot be scored without one: it was trained on "
            f"data.source = {export.manifest.config['data']['source']!r}. Such a model is scored while it trains "
            "(evaluation.interval)."
        )
    encoded = list(encode_documents(text.tokenizer, documents, text.eos_id))
    windows = [window for tokens in encoded for window in windows_of([text.eos_id, *tokens], text.seq_len)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nll = score_windows(Objective(export.model).to(device).eval(), windows, batch=batch)
    tokens = sum(map(len, encoded))
    return ModelScore(
        uri=uri,
        bits_per_byte=nll / math.log(2) / num_bytes,
        loss=nll / tokens,
        perplexity=math.exp(min(nll / tokens, _LARGEST_EXPONENT)),
        tokens=tokens,
        documents=len(documents),
        bytes=num_bytes,
    )


@torch.inference_mode()
def score_windows(objective: Objective, windows: Sequence[Window], *, batch: int) -> float:
    """Nats of all targets. The objective is in eval mode."""
    device = next(objective.parameters()).device
    total = sum(len(window) - 1 for window in windows)
    ordered = by_length(windows)
    nll = torch.zeros((), dtype=torch.float64, device=device)
    done, told_at = 0, time.monotonic()
    for start in range(0, len(ordered), batch):
        chosen = ordered[start : start + batch]
        loss, _ = objective({name: tensor.to(device) for name, tensor in batch_of(chosen).items()})
        nll += loss.double()
        done += sum(len(window) - 1 for window in chosen)
        if done == total or time.monotonic() - told_at > _PROGRESS_SECONDS:
            told_at = time.monotonic()
            _say(ProgressEvent(done=done, total=total, unit="tokens"))
    return float(nll.item())


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
    log_to_stderr(logging.INFO)
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
