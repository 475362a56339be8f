"""What an object is and what a storage promises: the Protocol, its errors, URIs and checksums."""

from __future__ import annotations

import base64
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import google_crc32c

Buffer = bytes | bytearray | memoryview
PIECE_BYTES = 16 << 20
"""What a copy, a download to disk and an upload from disk hold in memory."""

_COPY_BYTES = 1 << 20


class StorageError(Exception):
    """What went wrong with an object; the message carries its URI.

    StorageError
    ├── ObjectNotFoundError       no such object, or not in that generation
    ├── PreconditionFailedError   a conditional write or delete lost to another writer
    ├── ObjectCorruptError        the bytes are not those that were written
    ├── StorageUnavailableError   the service did not answer well for minutes; another try later can help
    └── UnsupportedUriError       neither gs:// nor file://
    """


class ObjectNotFoundError(StorageError):
    """No such object, or not in the generation that was asked for."""


class PreconditionFailedError(StorageError):
    """The object is not in the generation that the caller named."""


class ObjectCorruptError(StorageError):
    """The object's bytes do not have the checksum that they should have."""


class StorageUnavailableError(StorageError):
    """Overload, server errors or lost connections, for longer than is retried; the request itself was not refused."""


class UnsupportedUriError(StorageError):
    """A URI that is neither gs://bucket/name nor file:///path."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as storage has it now."""

    uri: str
    size: int
    """Bytes."""
    generation: int
    """Changes with every write. On disk: the modification time in nanoseconds."""
    crc32c: str
    """Base64 of the big-endian CRC32C. Empty in a listing on disk, where only reading the file tells: see `stat`."""


class Storage(Protocol):
    """Reads and writes whole objects, conditionally. Every method may block on the network; all raise StorageError.

    Transient failures (408, 429, 5xx, lost connections, answers cut short) are retried inside, until a deadline that
    the implementation has; then StorageUnavailableError is raised. Any other StorageError stays when it is tried again.
    A write without a condition is retried too, because writing the same bytes again is harmless.
    """

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """Bytes [start, start + length) of the object; all of it by default, then verified against its CRC32C.

        Raises ObjectNotFoundError, also when the live generation is not `generation`.
        """

    def write(
        self,
        uri: str,
        data: Buffer,
        *,
        if_generation_match: int | None = None,
        content_type: str = "application/octet-stream",
        known_crc32c: str | None = None,
    ) -> ObjectInfo:
        """Publish the object in one piece: readers see all of it or nothing. `data` is contiguous and is not copied.

        With `if_generation_match=0` the object must not exist; with another number it must be in that generation.
        Raises PreconditionFailedError otherwise. Over a network, an object with just these bytes is taken for the one
        that this call wrote, whose answer was lost. `known_crc32c` is for callers that have computed it already: over
        a network the bytes are held against it. Raises ObjectCorruptError when other bytes arrived, again and again;
        none of them are left.
        """

    def stat(self, uri: str) -> ObjectInfo | None:
        """The object's description, or None when there is none."""

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """Objects whose URI begins with `prefix_uri`, by name. On disk no file is read: `crc32c` is empty, ask `stat`."""

    def list_dirs(self, directory_uri: str) -> list[str]:
        """URIs of the directories right below `directory_uri`, sorted, without trailing slash."""

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """Remove the object. Raises ObjectNotFoundError or PreconditionFailedError."""

    def copy(
        self,
        source_uri: str,
        target_uri: str,
        *,
        source_generation: int | None = None,
        if_generation_match: int | None = None,
    ) -> ObjectInfo:
        """Copy one object within this storage; between buckets the service does it, and no payload passes through here.

        `source_generation` pins the source as in `read`, `if_generation_match` is the target's condition as in `write`.
        Raises UnsupportedUriError for a target of another scheme: see storage.copy_object.
        """

    def download(self, uri: str, path: Path) -> None:
        """The whole object into a file, verified against its CRC32C; of one that fails, nothing is left."""

    def upload(self, path: Path, uri: str, *, if_generation_match: int | None = None) -> ObjectInfo:
        """A whole file as an object, verified against its CRC32C, without holding all of it in memory."""


class Crc32c:
    """A running CRC32C, in Cloud Storage's spelling."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer) -> None:
        """Go on with these bytes."""
        view = memoryview(data)
        for start in range(
            0, len(view), _COPY_BYTES
        ):  # google_crc32c takes bytes only; a piece at a time is copied
            self._value = google_crc32c.extend(self._value, bytes(view[start : start + _COPY_BYTES]))

    @property
    def base64(self) -> str:
        """Of four big-endian bytes."""
        return base64.b64encode(self._value.to_bytes(4, "big")).decode()


def crc32c(data: Buffer) -> str:
    """CRC32C in Cloud Storage's spelling: base64 of four big-endian bytes."""
    checksum = Crc32c()
    checksum.update(data)
    return checksum.base64


def join(uri: str, *names: str) -> str:
    """`uri` and `names` with exactly one slash between."""
    return "/".join([uri.rstrip("/"), *(name.strip("/") for name in names)])


def split_gs(uri: str) -> tuple[str, str]:
    """(bucket, object name) of a gs:// URI; the name may be empty. Raises UnsupportedUriError."""
    scheme, separator, rest = uri.partition("://")
    bucket, _, name = rest.partition("/")
    if scheme != "gs" or not separator or not bucket:
        raise UnsupportedUriError(f"{uri!r} is not of the form gs://BUCKET/NAME.")
    return bucket, name


def path_of(uri: str) -> Path:
    """The path of a file:// URI. Raises UnsupportedUriError."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise UnsupportedUriError(f"{uri!r} is not of the form file:///PATH.")
    return Path(urllib.parse.unquote(parts.path))
