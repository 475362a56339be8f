"""The objects behind a source URI: which they are, what identifies their state, and their bytes in order."""

from __future__ import annotations

import base64
import hashlib
import re
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c

from penstock_components.launchers.errors import SourceError
from penstock_trainer.contract.dataset import Source
from penstock_trainer.contract.fields import canonical_json
from penstock_trainer.storage import ObjectInfo, storage_for

PIECE_BYTES = 8 * 1024 * 1024
PIECES_AHEAD = 8
"""Reads under way at once: hides the latency of many small objects, and bounds memory to 64 MiB."""

ALLOWED = (
    "Give one object (gs://BUCKET/corpus.jsonl), a prefix that ends in a slash (gs://BUCKET/raw/), or a pattern in which"
    " * stands for any characters but a slash and ** for any characters (gs://BUCKET/raw/*.jsonl)."
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a source."""

    source: Source
    start: int
    data: bytes

    @property
    def is_last(self) -> bool:
        """Nothing of the source comes after."""
        return self.start + len(self.data) == self.source.size


def list_sources(source_uri: str) -> tuple[Source, ...]:
    """Every object that `source_uri` stands for, by URI, pinned to the generation it has now.

    `source_uri` is a gs:// or file:// URI of an object, a prefix ending in `/`, or a pattern with `*`. Objects whose
    names end in `/` are the folder markers of consoles and are left out. Raises SourceError when nothing matches or
    when all that matches is empty; StorageError from below.
    """
    storage = storage_for(source_uri)
    if "*" in source_uri:
        pattern = _pattern(_readable(source_uri))
        listed = storage.list_objects(source_uri.partition("*")[0])
        infos = [info for info in listed if pattern.fullmatch(_readable(info.uri))]
    elif source_uri.endswith("/"):
        infos = list(storage.list_objects(source_uri))
    else:
        info = storage.stat(source_uri)
        infos = [info] if info is not None else []
    infos = [info for info in infos if not info.uri.endswith("/")]
    _require_some(source_uri, infos)
    infos = [_with_checksum(info) for info in infos]
    return tuple(
        Source(uri=info.uri, generation=info.generation, size=info.size, crc32c=info.crc32c)
        for info in sorted(infos, key=lambda info: info.uri)
    )


def fingerprint_of(sources: Iterable[Source]) -> str:
    """SHA-256 (hex) over (uri, generation, crc32c, size) of the sources by URI: another state, another fingerprint."""
    told = sorted((source.uri, source.generation, source.crc32c, source.size) for source in sources)
    return hashlib.sha256(canonical_json(told).encode()).hexdigest()


def read_pieces(sources: Iterable[Source]) -> Iterator[Piece]:
    """The bytes of the sources, in order, read ahead in the pinned generation; an empty source is one empty piece.

    Raises ObjectNotFoundError for a source that was overwritten since it was listed, and SourceError when its bytes
    do not have the listed CRC32C.
    """
    checksum = google_crc32c.Checksum()
    for piece in _read_ahead(sources):
        checksum.update(piece.data)
        if piece.is_last:
            found = base64.b64encode(checksum.digest()).decode()
            if found != piece.source.crc32c:
                raise SourceError(
                    f"{piece.source.uri}: read CRC32C {found}, storage lists {piece.source.crc32c}. Run the task "
                    "again; if it stays, the object is damaged and must be uploaded again."
                )
            checksum = google_crc32c.Checksum()
        yield piece


def _read_ahead(sources: Iterable[Source]) -> Iterator[Piece]:
    pending: deque[tuple[Source, int, Future[bytes]]] = deque()

    def oldest() -> Piece:
        source, start, future = pending.popleft()
        return Piece(source, start, future.result())

    with ThreadPoolExecutor(PIECES_AHEAD) as pool:
        for source in sources:
            for start in range(0, max(source.size, 1), PIECE_BYTES):
                length = min(PIECE_BYTES, source.size - start)
                read = storage_for(source.uri).read
                future = pool.submit(
                    read, source.uri, start=start, length=length, generation=source.generation
                )
                pending.append((source, start, future))
                if len(pending) == PIECES_AHEAD:
                    yield oldest()
        while pending:
            yield oldest()


def _with_checksum(info: ObjectInfo) -> ObjectInfo:
    """A listing on disk has no checksums: there the file is read for it. Raises SourceError when it was removed."""
    described = info if info.crc32c else storage_for(info.uri).stat(info.uri)
    if described is None:
        raise SourceError(f"{info.uri} was removed while it was listed. Run the task again.")
    return described


def _require_some(source_uri: str, infos: list[ObjectInfo]) -> None:
    if not infos:
        inside = "*" not in source_uri and not source_uri.endswith("/")
        inside = inside and any(True for _ in storage_for(source_uri).list_objects(source_uri + "/"))
        hint = f" There are objects under it: did you mean {source_uri}/ ?" if inside else ""
        raise SourceError(f"no object matches {source_uri}.{hint} {ALLOWED}")
    if not any(info.size for info in infos):
        raise SourceError(
            f"{source_uri} is empty: the {len(infos)} objects that match have 0 bytes. {ALLOWED}"
        )


def _readable(uri: str) -> str:
    """file:// URIs may be percent-encoded, gs:// URIs never are."""
    return urllib.parse.unquote(uri) if uri.startswith("file:") else uri


def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*+)", glob)
    told = {"": "", "*": "[^/]*"}
    return re.compile(
        "".join(told.get(part, ".*") if not part.strip("*") else re.escape(part) for part in parts), re.DOTALL
    )
