"""Payloads: opaque files that are complete and on disk before anything names them."""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from penstock_local.storage.errors import ChecksumMismatchError, UnsupportedError

COPY_BYTES = 1 << 20

ExpectedHashes = tuple[tuple[str, str], ...]
"""What the client says that the content hashes to: `crc32c` or `md5`, and the base64 digest. It may say it in several places."""


class StagedBlob:
    """Bytes on their way in, hashed as they come. Not thread-safe.

    The file is open only inside `write`, so that an upload which nobody finishes holds no descriptor.
    """

    def __init__(self, path: Path, *, with_md5: bool = True) -> None:
        self.path = path
        self.size = 0
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
        path.touch(mode=0o600, exist_ok=False)

    @property
    def crc32c(self) -> str:
        """Base64, of the bytes so far."""
        return base64.b64encode(self._crc32c.to_bytes(4, "big")).decode()

    @property
    def md5(self) -> str | None:
        """Base64, of the bytes so far; None when it was not asked for."""
        return base64.b64encode(self._md5.digest()).decode() if self._md5 else None

    def write(self, data: bytes) -> None:
        """Append; after an OSError (disk full) the blob is as before."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.size)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        self._crc32c = google_crc32c.extend(self._crc32c, data)
        if self._md5:
            self._md5.update(data)
        self.size += len(data)

    def write_from(self, source: BinaryIO) -> None:
        """Append what is left in a file."""
        while data := source.read(COPY_BYTES):
            self.write(data)

    def check(self, expected: ExpectedHashes) -> None:
        """Raises ChecksumMismatchError, or UnsupportedError for an MD5 of content put together from parts."""
        actual = {"crc32c": self.crc32c, "md5": self.md5}
        for algorithm, digest in expected:
            if actual[algorithm] is None:
                raise UnsupportedError(
                    f"{algorithm} of an object made of parts is not computed; send crc32c."
                )
            if actual[algorithm] != digest:
                raise ChecksumMismatchError(
                    f"Provided {algorithm} hash {digest!r} doesn't match calculated {algorithm} hash "
                    f"{actual[algorithm]!r} of the {self.size} bytes received. Nothing was stored."
                )

    def seal(self) -> None:
        """Wait until the bytes are on disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove the file; a second call does nothing."""
        self.path.unlink(missing_ok=True)


class BlobDirectory:
    """The files of one store, flat, under names that say nothing. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def stage(self, *, with_md5: bool = True) -> StagedBlob:
        """A new empty blob. Without `with_md5` it costs half: for content that has no MD5 on Cloud Storage."""
        return StagedBlob(self._root / uuid.uuid4().hex, with_md5=with_md5)

    def link(self, name: str) -> str:
        """A second name for a blob's bytes, which are never changed in place."""
        copy = uuid.uuid4().hex
        (self._root / copy).hardlink_to(self._root / name)
        return copy

    def open(self, name: str) -> BinaryIO:
        """The blob, at its first byte. It can be read to its end even when it is removed meanwhile."""
        return (self._root / name).open("rb", buffering=0)

    def damage(self, name: str, *, cut: bool) -> int:
        """Put other bytes in the place of a blob's, for this name alone; how many there are now."""
        content = bytearray((self._root / name).read_bytes())
        middle = len(content) // 2
        if cut:
            del content[middle:]
        elif content:
            content[middle] ^= 1
        replacement = self._root / uuid.uuid4().hex
        replacement.write_bytes(content)
        replacement.replace(self._root / name)
        return len(content)

    def remove(self, name: str) -> None:
        """Forget a blob; a second call does nothing."""
        (self._root / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Wait until names made before this call survive a power cut."""
        descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def keep_only(self, names: Iterable[str]) -> int:
        """Remove what no row names (uploads that a crash cut off); returns how many files went."""
        known = set(names)
        orphans = [path for path in self._root.iterdir() if path.name not in known]
        for path in orphans:
            path.unlink()
        return len(orphans)


def hex_digest(digest: str | None) -> str:
    """A base64 digest as hexadecimal digits; empty for None."""
    return base64.b64decode(digest or "").hex()
