"""Make a dataset of token shards and held-out documents from JSONL or plain text.

    python -m penstock_components.launchers.stage_data --executor-input '{{$}}'

The same inputs give the same bytes, whatever happened in between. The manifest is written last; a retry that finds
one for the same fingerprint adopts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock_components.launchers import executor
from penstock_components.launchers.documents import Document, read_documents
from penstock_components.launchers.errors import DatasetError, InputError, SourceError
from penstock_components.launchers.progress import Progress
from penstock_components.launchers.series import ObjectSeries, publish
from penstock_components.launchers.sources import fingerprint_of, list_sources
from penstock_components.launchers.tokenizer import (
    SMALLEST_VOCAB,
    DocumentTokenizer,
    Sample,
    load_tokenizer,
    train_tokenizer,
)
from penstock_trainer.contract.dataset import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TOKEN_COUNTS_NAME,
    TOKENIZER_NAME,
    DatasetManifest,
    DatasetObject,
    Source,
    token_type_for,
)
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import PreconditionFailedError, join, storage_for

log = logging.getLogger(__name__)

BATCH_CHARS = 4_000_000
"""Text that is encoded at once: enough to keep all cores busy, little beside a shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    source_uri: str
    fingerprint: str
    vocab_size: int
    tokenizer_uri: str
    eval_fraction: float
    required_tokens: int

    def check(self) -> None:
        """Raises InputError for a value that is out of range."""
        if not 0 < self.eval_fraction < 1:
            raise InputError(
                f"eval_fraction = {self.eval_fraction} is not valid: it must be between 0 and 1."
            )
        if not self.tokenizer_uri and self.vocab_size < SMALLEST_VOCAB:
            raise InputError(
                f"vocab_size = {self.vocab_size} is not valid: a byte-level vocabulary has at least {SMALLEST_VOCAB} ids."
            )


def stage_data(task: executor.ExecutorInput) -> None:
    """Stage the dataset, or adopt the one that an earlier try has finished."""
    inputs = task.parameters_as(Inputs)
    inputs.check()
    output = task.output("dataset")
    manifest = _adopt(output.uri, inputs.fingerprint) or _stage(inputs, output.uri)
    eval_documents = sum(entry.documents for entry in manifest.evaluation)
    log.info(
        "%s: %d train tokens in %d shards, %d held-out documents, %d ids",
        output.uri, manifest.train_tokens, len(manifest.train), eval_documents, manifest.tokenizer.vocab_size,
    )  # fmt: skip
    executor.write_outputs(
        task,
        parameters={"uri": output.uri, "train_tokens": manifest.train_tokens},
        metadata={
            "dataset": {
                "train_tokens": manifest.train_tokens,
                "train_documents": sum(entry.documents for entry in manifest.train),
                "eval_documents": eval_documents,
                "eval_bytes": sum(entry.text_bytes for entry in manifest.evaluation),
                "vocab_size": manifest.tokenizer.vocab_size,
                "tokenizer_sha256": manifest.tokenizer.sha256,
                "fingerprint": inputs.fingerprint,
            }
        },
    )


def _adopt(dataset_uri: str, fingerprint: str) -> DatasetManifest | None:
    """The dataset that stands at the URI, if it is whole and of this fingerprint."""
    uri = join(dataset_uri, MANIFEST_NAME)
    storage = storage_for(uri)
    if storage.stat(uri) is None:
        return None
    try:
        manifest = DatasetManifest.from_json(storage.read(uri))
    except ContractError as exc:
        log.warning("%s is not adopted and will be replaced: %s", uri, exc)
        return None
    if fingerprint_of(manifest.sources) != fingerprint:
        log.warning("%s is not adopted and will be replaced: it was made from other sources", uri)
        return None
    for entry in (*manifest.train, *manifest.evaluation, manifest.token_counts):
        info = storage.stat(join(dataset_uri, entry.name))
        if info is None or (info.size, info.crc32c) != (entry.size, entry.crc32c):
            log.warning("%s is not adopted and will be replaced: %s is missing or damaged", uri, entry.name)
            return None
    tokenizer_uri = join(dataset_uri, TOKENIZER_NAME)
    tokenizer = storage.read(tokenizer_uri) if storage.stat(tokenizer_uri) else b""
    if hashlib.sha256(tokenizer).hexdigest() != manifest.tokenizer.sha256:
        log.warning("%s is not adopted and will be replaced: %s is missing or damaged", uri, TOKENIZER_NAME)
        return None
    log.info("%s: adopted, an earlier try has finished it", dataset_uri)
    return manifest


def _stage(inputs: Inputs, dataset_uri: str) -> DatasetManifest:
    standing = storage_for(dataset_uri).stat(join(dataset_uri, MANIFEST_NAME))
    sources = list_sources(inputs.source_uri)
    if fingerprint_of(sources) != inputs.fingerprint:
        raise SourceError(
            f"{inputs.source_uri} has fingerprint {fingerprint_of(sources)}, the fingerprint task saw {inputs.fingerprint}: "
            "the source changed in between. Start the run again."
        )
    passes = 1 if inputs.tokenizer_uri else 2
    progress = Progress(total=passes * sum(source.size for source in sources), unit="bytes read")
    tokenizer = _tokenizer(inputs, sources, progress)
    manifest = _write_splits(inputs, dataset_uri, sources, tokenizer, progress)
    return _publish_manifest(dataset_uri, manifest, standing.generation if standing else 0)


def _tokenizer(inputs: Inputs, sources: tuple[Source, ...], progress: Progress) -> DocumentTokenizer:
    if inputs.tokenizer_uri:
        return load_tokenizer(inputs.tokenizer_uri)
    sample = Sample()
    for document in read_documents(sources, on_bytes=progress.advance):
        if not document.is_held_out(inputs.eval_fraction):
            sample.add(document)
    return train_tokenizer(sample.texts(), vocab_size=inputs.vocab_size)


def _write_splits(
    inputs: Inputs,
    dataset_uri: str,
    sources: tuple[Source, ...],
    tokenizer: DocumentTokenizer,
    progress: Progress,
) -> DatasetManifest:
    train = ObjectSeries(dataset_uri, "train/shard-{:05d}.tokens")
    held_out = ObjectSeries(dataset_uri, "eval/documents-{:05d}.jsonl")
    counts = np.zeros(tokenizer.info.vocab_size, dtype="<u8")
    dropped: Counter[str] = Counter()

    def train_documents() -> Iterator[Document]:
        for document in read_documents(sources, on_bytes=progress.advance):
            if not document.text.strip():
                dropped["empty"] += 1
            elif document.is_held_out(inputs.eval_fraction):
                line = json.dumps({"id": document.id, "text": document.text}) + "\n"
                held_out.add(line.encode(), tokens=0, text_bytes=document.num_bytes)
            else:
                yield document

    for batch in _batches(train_documents()):
        encoded = tokenizer.encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            train.add(ids.tobytes(), tokens=len(ids), text_bytes=document.num_bytes)
        counts += np.bincount(np.concatenate(encoded), minlength=len(counts)).astype(counts.dtype)
    shards, evaluation = train.close(), held_out.close()
    _require_enough(inputs, shards, evaluation)
    publish(dataset_uri, TOKENIZER_NAME, tokenizer.data)
    return DatasetManifest(
        format_version=FORMAT_VERSION,
        token_type=token_type_for(tokenizer.info.vocab_size),
        tokenizer=tokenizer.info,
        train=shards,
        evaluation=evaluation,
        token_counts=publish(dataset_uri, TOKEN_COUNTS_NAME, counts.tobytes()),
        sources=sources,
        filters=dict(dropped),
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _require_enough(
    inputs: Inputs, train: tuple[DatasetObject, ...], evaluation: tuple[DatasetObject, ...]
) -> None:
    train_documents, eval_documents = (sum(entry.documents for entry in side) for side in (train, evaluation))
    total = f"{inputs.source_uri} has {train_documents + eval_documents} documents with text"
    if not eval_documents:
        raise DatasetError(
            f"{total}, and with eval_fraction = {inputs.eval_fraction} none of them is held out for evaluation. Give more "
            "documents or a larger eval_fraction."
        )
    if not train_documents:
        raise DatasetError(
            f"{total}, and with eval_fraction = {inputs.eval_fraction} all of them are held out. Give more documents or a "
            "smaller eval_fraction."
        )
    tokens = sum(entry.tokens for entry in train)
    if tokens < inputs.required_tokens:
        raise DatasetError(
            f"the train split of {inputs.source_uri} has {tokens:,} tokens, and one batch needs {inputs.required_tokens:,}. "
            "Give more text, or make global_batch or seq_len smaller."
        )


def _publish_manifest(dataset_uri: str, manifest: DatasetManifest, generation: int) -> DatasetManifest:
    """Written last, and over nothing but what this task has seen there: generation 0 means nothing."""
    uri = join(dataset_uri, MANIFEST_NAME)
    try:
        storage_for(uri).write(
            uri,
            manifest.to_json().encode(),
            if_generation_match=generation,
            content_type="application/json",
        )
    except PreconditionFailedError:
        # Another try of this task got there first. The same inputs give the same bytes, so its dataset is ours.
        adopted = _adopt(dataset_uri, fingerprint_of(manifest.sources))
        if adopted is None:
            raise
        return adopted
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the task."""
    return executor.run(stage_data, argv)


if __name__ == "__main__":
    sys.exit(main())
