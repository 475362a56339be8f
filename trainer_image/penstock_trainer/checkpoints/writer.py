"""The process beside a rank that writes its checkpoints: `python -m penstock_trainer.checkpoints.writer <buffer's descriptor>`.

It reads commands from stdin and answers on stdout, one JSON object a line each, and logs to stderr:

    {"setup": Setup}                                         first of all; no answer
    {"write": {"step", "directory", "expected"}}             -> {"written": Receipt} | {"failed": Failure}
    {"commit": {"manifest", "directory", "receipts", "keep"}} -> {"committed": seconds} | {"failed": Failure}

A process of its own, because hashing and sending would take the interpreter's lock from the rank's steps; without torch,
because it then starts in a third of a second and holds about 30 MB. It ends with its rank, and at the end of stdin.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import mmap
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from penstock_trainer.checkpoints.commit import Committer
from penstock_trainer.checkpoints.layout import PlannedObject, Receipt, TensorInfo
from penstock_trainer.checkpoints.ownership import check_ownership
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.contract.checkpoint import CheckpointObject, Owner, step_dir_uri
from penstock_trainer.contract.fields import ContractError, canonical_json, from_dict
from penstock_trainer.errors import FencedError, PeerError, TrainerError
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.storage import (
    Crc32c,
    PreconditionFailedError,
    Storage,
    StorageError,
    StorageUnavailableError,
    join,
    storage_for,
)

logger = logging.getLogger(__name__)

OBJECTS_AT_ONCE = 4
"""Sent by one rank; a node has several ranks."""
_PIECE = 2**20
"""Hashed at once: the copy that google_crc32c needs stays in the processor's cache."""

NICENESS = 10
"""Where processors are short, the training has them first."""

FailureKind = Literal["fenced", "unavailable", "lost", "refused", "impossible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What does not change between saves: whence a rank's objects come, and where they go."""

    root_uri: str
    """Where checkpoints go."""
    owner: Owner
    asks_owner: bool = True
    """Whether each write asks first if `owner` still owns the root. Not of a node's own disk, which has no owner.json."""
    objects: tuple[PlannedObject, ...]
    source_dir: str = ""
    """Path of another root from whose files the objects are taken. Empty: they are stretches of the buffer."""
    tensors: Mapping[str, TensorInfo]
    retention: Retention


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a command was not carried out."""

    kind: FailureKind
    """fenced: another attempt owns the root. unavailable, lost: storage or a peer; another try may help. refused: storage will not have it.
    impossible: nothing of storage's."""
    error: str


class Writer:
    """Carries out the commands. Every method blocks on storage; they raise StorageError, ContractError or FencedError."""

    def __init__(self, setup: Setup, buffer: memoryview, storage: Storage) -> None:
        self._setup = setup
        self._buffer = buffer
        self._storage = storage
        self._committer = Committer(
            setup.root_uri,
            setup.owner,
            storage,
            check_owner=self._check_owner,
            tensors=setup.tensors,
            retention=setup.retention,
        )

    def write(self, step: int, directory: str, expected: Mapping[str, str] | None = None) -> Receipt:
        """Store the objects below `directory` of the step's directory, unless the root has another owner.

        `expected`: the CRC32C that an object was written to this node's disk with, by name, where it comes from there.
        Raises StorageUnavailableError when it has changed there: this save is lost, the next may be well.
        """
        self._check_owner()
        chunks: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        objects = []
        with ThreadPoolExecutor(OBJECTS_AT_ONCE) as pool:
            planned = self._setup.objects
            stored = pool.map(lambda one: self._store(one, step, directory, expected or {}), planned)
            for one, (entry, checksums) in zip(planned, stored, strict=True):
                objects.append(entry)
                for fqn, chunk in _indexed(one, entry.name, checksums):
                    chunks[fqn].append(chunk)
        return Receipt(objects=tuple(objects), chunks=chunks)

    def commit(
        self, manifest: Mapping[str, Any], directory: str, receipts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make a checkpoint of what all ranks have written; see Committer."""
        self._committer.commit(manifest, directory, receipts)

    def prune(self, keep: Sequence[int] = (), *, is_asked: Callable[[], bool] = lambda: False) -> None:
        """Delete what need not be kept; see Committer. Raises nothing: the run goes on with more on storage."""
        try:
            self._committer.prune(keep, is_asked=is_asked)
        except Exception:
            logger.warning("old checkpoints are left where they are", exc_info=True)

    def _store(
        self, planned: PlannedObject, step: int, directory: str, expected: Mapping[str, str]
    ) -> tuple[CheckpointObject, list[str]]:
        """Its entry for the manifest, and the CRC32C of each of its chunks."""
        name = join(directory, planned.name)
        uri = join(step_dir_uri(self._setup.root_uri, step), name)
        with self._bytes_of(planned, step, name) as data:
            hashes = hashed(data, planned)
            if expected.get(name, hashes.crc32c) != hashes.crc32c:
                raise StorageUnavailableError(
                    f"{name} on this node's disk is no longer what was written to it"
                )
            try:
                info = self._storage.write(uri, data, if_generation_match=0, known_crc32c=hashes.crc32c)
            except PreconditionFailedError:
                # A writer before this one was lost when it had stored the object already.
                standing = self._storage.stat(uri)
                if standing is None or (standing.crc32c, standing.size) != (hashes.crc32c, len(data)):
                    raise
                info = standing
        entry = CheckpointObject(
            name=name,
            generation=info.generation,
            size=info.size,
            crc32c=info.crc32c,
            sha256=hashes.sha256,
        )
        return entry, hashes.chunks

    @contextmanager
    def _bytes_of(self, planned: PlannedObject, step: int, name: str) -> Iterator[memoryview]:
        if not self._setup.source_dir:
            yield self._buffer[planned.begin : planned.end]
            return
        path = Path(step_dir_uri(self._setup.source_dir, step), name)
        try:
            file = path.open("rb")
        except OSError as exc:
            raise StorageUnavailableError(f"{path} cannot be read any more: {exc}") from exc
        size = planned.end - planned.begin
        with file:
            if os.fstat(file.fileno()).st_size != size:
                raise StorageUnavailableError(
                    f"{path} has no longer the {size} bytes that were written to it"
                )
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as data:
                yield data

    def _check_owner(self) -> None:
        if self._setup.asks_owner:
            check_ownership(self._setup.root_uri, self._setup.owner, self._storage)


@dataclass(frozen=True, slots=True)
class Hashes:
    """Of an object, in one pass."""

    sha256: str
    crc32c: str
    chunks: list[str]
    """CRC32C of each."""


def hashed(data: memoryview, planned: PlannedObject) -> Hashes:
    """Of the bytes of an object, whose chunks are where the plan says."""
    sha256, whole, chunks = hashlib.sha256(), Crc32c(), []
    at = 0
    for chunk in planned.chunks:
        begin = chunk.begin - planned.begin
        padding = bytes(data[at:begin])
        sha256.update(padding)
        whole.update(padding)
        of_chunk = Crc32c()
        at = begin + chunk.length
        for start in range(begin, at, _PIECE):
            piece = bytes(data[start : min(start + _PIECE, at)])
            for hash_ in (sha256, whole, of_chunk):
                hash_.update(piece)
        chunks.append(of_chunk.base64)
    return Hashes(sha256.hexdigest(), whole.base64, chunks)


def _indexed(
    planned: PlannedObject, name: str, checksums: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(tensor, chunk as the index has it)."""
    for chunk, checksum in zip(planned.chunks, checksums, strict=True):
        yield (
            chunk.fqn,
            {
                "offsets": chunk.offsets,
                "sizes": chunk.sizes,
                "object": name,
                "byte_offset": chunk.begin - planned.begin,
                "length": chunk.length,
                "crc32c": checksum,
            },
        )


def failure_of(error: Exception) -> Failure:
    """What to tell others of an error."""
    if isinstance(error, FencedError):
        return Failure(kind="fenced", error=str(error))
    if isinstance(error, StorageUnavailableError):
        return Failure(kind="unavailable", error=str(error))
    if isinstance(error, PeerError) and error.is_transient:
        return Failure(kind="lost", error=str(error))
    if isinstance(error, (StorageError, ContractError)):
        return Failure(kind="refused", error=str(error))
    known = isinstance(error, TrainerError)
    return Failure(kind="impossible", error=str(error) if known else f"{type(error).__name__}: {error}")


def serve(
    buffer: memoryview, commands: Iterator[str], *, is_asked: Callable[[], bool]
) -> Iterator[Mapping[str, Any]]:
    """Answers to the commands, in order. `is_asked`: whether another one waits."""
    first = next(commands, "")
    if not first:  # the run ended before it saved anything
        return
    setup = from_dict(Setup, json.loads(first)["setup"])
    writer = Writer(setup, buffer, storage_for(setup.root_uri))
    for line in commands:
        [(command, told)] = json.loads(line).items()
        began = time.monotonic()
        try:
            if command == "write":
                yield {"written": writer.write(**told)}
            else:
                keep = told.pop("keep")
                writer.commit(**told)
                yield {"committed": time.monotonic() - began}
                writer.prune(keep, is_asked=is_asked)
        except Exception as exc:
            yield {"failed": failure_of(exc)}


def _is_asked() -> bool:
    """Whether a command has come. The end of stdin is none."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and bool(cast("io.BufferedReader", sys.stdin.buffer).peek(1))


def main(argv: Sequence[str]) -> int:
    """Serve until stdin ends."""
    log_to_stderr(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING, role="writer")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # the rank decides when this ends: it has something left to save
    os.nice(NICENESS)
    descriptor = int(argv[0])
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as shared, memoryview(shared) as buffer:
        for answer in serve(buffer, iter(sys.stdin.readline, ""), is_asked=_is_asked):
            sys.stdout.write(canonical_json(answer) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
