"""Objects at gs:// and file:// URIs behind one small Protocol; the only door to storage of both images.

Why it exists: the commit protocols of datasets and checkpoints need exactly conditional writes, pinned reads and
checksums, and nothing of what differs between a bucket and a disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from penstock_trainer.storage.files import FileStorage
from penstock_trainer.storage.gcs import GcsStorage
from penstock_trainer.storage.objects import (
    PIECE_BYTES,
    Buffer,
    Crc32c,
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    Storage,
    StorageError,
    StorageUnavailableError,
    UnsupportedUriError,
    crc32c,
    join,
    path_of,
    split_gs,
)

__all__ = [
    "Buffer",
    "Crc32c",
    "FileStorage",
    "GcsStorage",
    "ObjectCorruptError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "PreconditionFailedError",
    "Storage",
    "StorageError",
    "StorageUnavailableError",
    "UnsupportedUriError",
    "copy_object",
    "crc32c",
    "join",
    "path_of",
    "split_gs",
    "storage_for",
]


def storage_for(uri: str) -> Storage:
    """The process's storage for a URI's scheme; its client is made on the first call. Raises UnsupportedUriError."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme not in ("gs", "file"):
        raise UnsupportedUriError(f"{uri!r} is not a storage URI: give gs://BUCKET/NAME or file:///PATH.")
    return _storage_of(scheme)


@functools.cache
def _storage_of(scheme: str) -> Storage:
    return GcsStorage() if scheme == "gs" else FileStorage()


def copy_object(
    source_uri: str,
    target_uri: str,
    *,
    source_generation: int | None = None,
    if_generation_match: int | None = None,
) -> ObjectInfo:
    """Copy one object, also between a bucket and a disk, verified; conditions as in Storage.copy.

    Between buckets the service does it. Else the bytes pass through here in pieces of PIECE_BYTES. Raises StorageError.
    """
    source, target = storage_for(source_uri), storage_for(target_uri)
    if source is target:
        return source.copy(
            source_uri,
            target_uri,
            source_generation=source_generation,
            if_generation_match=if_generation_match,
        )
    found = source.stat(source_uri)
    if found is None or source_generation not in (None, found.generation):
        raise ObjectNotFoundError(f"{source_uri} does not exist in generation {source_generation or 'any'}.")
    if isinstance(target, FileStorage):
        return target.write_pieces(
            target_uri,
            _pieces(source, found),
            if_generation_match=if_generation_match,
            expected_crc32c=found.crc32c,
        )
    copied = target.upload(path_of(source_uri), target_uri, if_generation_match=if_generation_match)
    if copied.crc32c != found.crc32c:
        target.delete(target_uri, if_generation_match=copied.generation)
        raise ObjectCorruptError(f"{source_uri} was changed while it was copied to {target_uri}.")
    return copied


def _pieces(source: Storage, found: ObjectInfo) -> Iterator[bytes]:
    for start in range(0, found.size, PIECE_BYTES):
        length = min(PIECE_BYTES, found.size - start)
        yield source.read(found.uri, start=start, length=length, generation=found.generation)
