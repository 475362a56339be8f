"""Objects at gs:// and file:// URIs behind one small Protocol; the only door to storage of both images.

Why it exists: the commit protocols of datasets and checkpoints need exactly conditional writes, pinned reads and
checksums, and nothing of what differs between a bucket and a disk.
"""

from __future__ import annotations

import functools

from penstock_trainer.storage.files import FileStorage
from penstock_trainer.storage.gcs import GcsStorage
from penstock_trainer.storage.objects import (
    Buffer,
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
