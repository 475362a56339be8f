"""Objects at gs:// and file:// URIs behind one small Protocol; the only door to storage of both images.

Why it exists: the commit protocols of datasets and checkpoints need exactly conditional writes, pinned reads and
checksums, and nothing of what differs between a bucket and a disk.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import os
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import google_crc32c

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

Buffer = bytes | bytearray | memoryview
_TEMPORARY_PREFIX = ".writing-"


class StorageError(Exception):
    """What went wrong with an object; the message carries its URI.

    StorageError
    ├── ObjectNotFoundError       no such object, or not in that generation
    ├── PreconditionFailedError   a conditional write or delete lost to another writer
    ├── ObjectCorruptError        the bytes are not those that were written
    └── UnsupportedUriError       neither gs:// nor file://
    """


class ObjectNotFoundError(StorageError):
    """No such object, or not in the generation that was asked for."""


class PreconditionFailedError(StorageError):
    """The object is not in the generation that the caller named."""


class ObjectCorruptError(StorageError):
    """The object's bytes do not have the checksum that they should have."""


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
    """Base64 of the big-endian CRC32C. On disk it is computed on request, see `Storage.stat`."""


class Storage(Protocol):
    """Reads and writes whole objects, conditionally. Every method may block on the network; all raise StorageError.

    Transient failures (429, 5xx, lost connections) are retried inside. A write without a condition is retried too,
    because writing the same bytes again is harmless.
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
    ) -> ObjectInfo:
        """Publish the object in one piece: readers see all of it or nothing.

        With `if_generation_match=0` the object must not exist; with another number it must be in that generation.
        Raises PreconditionFailedError otherwise. Over a network, an object with just these bytes is taken for the one
        that this call wrote, whose answer was lost.
        """

    def stat(self, uri: str) -> ObjectInfo | None:
        """The object's description, or None when there is none."""

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """Objects whose URI begins with `prefix_uri`, by name."""

    def list_dirs(self, directory_uri: str) -> list[str]:
        """URIs of the directories right below `directory_uri`, sorted, without trailing slash."""

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """Remove the object. Raises ObjectNotFoundError or PreconditionFailedError."""

    def copy(self, source_uri: str, target_uri: str) -> ObjectInfo:
        """Copy one object; between buckets the service does it, and no payload passes through here."""

    def download(self, uri: str, path: Path) -> None:
        """The whole object into a file, verified against its CRC32C."""

    def upload(self, path: Path, uri: str) -> ObjectInfo:
        """A whole file as an object, verified against its CRC32C."""


def crc32c(data: Buffer) -> str:
    """CRC32C in Cloud Storage's spelling: base64 of four big-endian bytes."""
    view, checksum = memoryview(data), 0
    for start in range(0, len(view), 1 << 20):  # google_crc32c takes bytes only; a piece at a time is copied
        checksum = google_crc32c.extend(checksum, bytes(view[start : start + (1 << 20)]))
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def join(uri: str, *names: str) -> str:
    """`uri` and `names` with exactly one slash between."""
    return "/".join([uri.rstrip("/"), *(name.strip("/") for name in names)])


def storage_for(uri: str) -> Storage:
    """The process's storage for a URI's scheme; its client is made on the first call. Raises UnsupportedUriError."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme not in ("gs", "file"):
        raise UnsupportedUriError(f"{uri!r} is not a storage URI: give gs://BUCKET/NAME or file:///PATH.")
    return _storage_of(scheme)


@functools.cache
def _storage_of(scheme: str) -> Storage:
    return GcsStorage() if scheme == "gs" else FileStorage()


class GcsStorage:
    """Cloud Storage through google-cloud-storage, with application default credentials."""

    def __init__(self, client: Client | None = None) -> None:
        # Imported here: a program that only touches file:// starts half a second earlier.
        from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage import Client
        from google.cloud.storage.exceptions import DataCorruption
        from google.cloud.storage.retry import DEFAULT_RETRY
        from urllib3.exceptions import HTTPError

        self._client = client or Client()
        self._not_found, self._precondition_failed, self._corrupt = (
            NotFound,
            PreconditionFailed,
            DataCorruption,
        )
        # OSError: local files, and everything of requests. HTTPError: bodies are read from urllib3 directly.
        self._other_errors = (GoogleAPIError, GoogleAuthError, HTTPError, OSError)
        # A conditional write that is retried after a lost answer finds its own object; see `write`.
        self._retry = DEFAULT_RETRY.with_timeout(300.0)

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """See Storage.read."""
        if length == 0:
            return b""
        blob = self._blob(uri, generation=generation)
        ranged = start > 0 or length is not None
        with self._translated(uri):
            data: bytes = blob.download_as_bytes(
                start=start if ranged else None,
                end=start + length - 1 if length is not None else None,
                checksum=None if ranged else "crc32c",
                retry=self._retry,
                raw_download=True,
            )
        if length is not None and len(data) != length:
            raise ObjectCorruptError(
                f"{uri}: asked for {length} bytes from {start}, the object gave {len(data)}."
            )
        return data

    def write(
        self,
        uri: str,
        data: Buffer,
        *,
        if_generation_match: int | None = None,
        content_type: str = "application/octet-stream",
    ) -> ObjectInfo:
        """See Storage.write."""
        blob = self._blob(uri)
        checksum = crc32c(data)
        blob.crc32c = checksum  # the server refuses other bytes
        try:
            with self._translated(uri):
                blob.upload_from_string(
                    bytes(data),
                    content_type=content_type,
                    if_generation_match=if_generation_match,
                    retry=self._retry,
                    checksum=None,
                )
        except PreconditionFailedError:
            # The first try may have been written although its answer was lost: then what stands there is ours.
            standing = self.stat(uri)
            if standing is None or (standing.crc32c, standing.size) != (checksum, len(data)):
                raise
            return standing
        return _info(uri, blob)

    def stat(self, uri: str) -> ObjectInfo | None:
        """See Storage.stat."""
        bucket, name = split_gs(uri)
        with self._translated(uri):
            blob = self._client.bucket(bucket).get_blob(name, retry=self._retry)
        return _info(uri, blob) if blob is not None else None

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """See Storage.list_objects."""
        bucket, prefix = split_gs(prefix_uri)
        with self._translated(prefix_uri):
            for blob in self._client.list_blobs(bucket, prefix=prefix, retry=self._retry):
                yield _info(f"gs://{bucket}/{blob.name}", blob)

    def list_dirs(self, directory_uri: str) -> list[str]:
        """See Storage.list_dirs."""
        bucket, prefix = split_gs(directory_uri.rstrip("/") + "/")
        with self._translated(directory_uri):
            pages = self._client.list_blobs(bucket, prefix=prefix, delimiter="/", retry=self._retry).pages
            found = {name for page in pages for name in page.prefixes}
        return sorted(f"gs://{bucket}/{name.rstrip('/')}" for name in found)

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """See Storage.delete."""
        with self._translated(uri):
            self._blob(uri).delete(if_generation_match=if_generation_match, retry=self._retry)

    def copy(self, source_uri: str, target_uri: str) -> ObjectInfo:
        """See Storage.copy."""
        if not target_uri.startswith("gs://"):
            return storage_for(target_uri).write(target_uri, self.read(source_uri))
        source, target = self._blob(source_uri), self._blob(target_uri)
        with self._translated(source_uri):
            token, _, _ = target.rewrite(source, retry=self._retry)
            while token is not None:
                token, _, _ = target.rewrite(source, token=token, retry=self._retry)
        return _info(target_uri, target)

    def download(self, uri: str, path: Path) -> None:
        """See Storage.download."""
        with self._translated(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._blob(uri).download_to_filename(
                str(path), checksum="crc32c", retry=self._retry, raw_download=True
            )

    def upload(self, path: Path, uri: str) -> ObjectInfo:
        """See Storage.upload."""
        blob = self._blob(uri)
        with self._translated(uri):
            blob.upload_from_filename(str(path), checksum="crc32c", retry=self._retry)
        return _info(uri, blob)

    def _blob(self, uri: str, *, generation: int | None = None) -> Blob:
        bucket, name = split_gs(uri)
        return self._client.bucket(bucket).blob(name, generation=generation)

    @contextmanager
    def _translated(self, uri: str) -> Iterator[None]:
        try:
            yield
        except self._not_found as exc:
            raise ObjectNotFoundError(f"{uri} does not exist: {exc.message}") from exc
        except self._precondition_failed as exc:
            raise PreconditionFailedError(
                f"{uri} is not in the generation that was expected: {exc.message}"
            ) from exc
        except self._corrupt as exc:
            raise ObjectCorruptError(f"{uri} is corrupt: {exc}") from exc
        except self._other_errors as exc:
            raise StorageError(f"{uri}: {exc}") from exc


class FileStorage:
    """Objects as files below file:///. A write is a temporary file, fsync, then a link or a rename: readers never see half."""

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """See Storage.read. There is no stored checksum on disk to verify against; callers' manifests carry one."""
        with _file_errors(uri), path_of(uri).open("rb") as file:
            if generation is not None and os.fstat(file.fileno()).st_mtime_ns != generation:
                raise ObjectNotFoundError(
                    f"{uri} does not exist in generation {generation}; it was overwritten."
                )
            file.seek(start)
            data = file.read() if length is None else file.read(length)
        if length is not None and len(data) != length:
            raise ObjectCorruptError(
                f"{uri}: asked for {length} bytes from {start}, the file gave {len(data)}."
            )
        return data

    def write(
        self,
        uri: str,
        data: Buffer,
        *,
        if_generation_match: int | None = None,
        content_type: str = "application/octet-stream",  # noqa: ARG002  # files carry no content type
    ) -> ObjectInfo:
        """See Storage.write. A condition other than 0 is checked and applied under a lock on the directory."""
        path = path_of(uri)
        temporary = path.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        with _file_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    # The kernel's own stamp moves in ticks of milliseconds; two writes within one would share a
                    # generation.
                    stamp = time.time_ns()
                    os.utime(file.fileno(), ns=(stamp, stamp))
                    os.fsync(file.fileno())
                self._publish(temporary, path, uri, if_generation_match)
            finally:
                temporary.unlink(missing_ok=True)
            return ObjectInfo(uri, len(data), path.stat().st_mtime_ns, crc32c(data))

    def stat(self, uri: str) -> ObjectInfo | None:
        """See Storage.stat. Reads the file for its checksum."""
        path = path_of(uri)
        try:
            with _file_errors(uri):
                status = path.stat()
                return ObjectInfo(uri, status.st_size, status.st_mtime_ns, _file_crc32c(path))
        except ObjectNotFoundError:
            return None

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """See Storage.list_objects."""
        prefix = str(path_of(prefix_uri)) + ("/" if prefix_uri.endswith("/") else "")
        top = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
        for path in sorted(top.rglob("*")):
            if (
                path.is_file()
                and str(path).startswith(prefix)
                and not path.name.startswith(_TEMPORARY_PREFIX)
            ):
                info = self.stat(path.as_uri())
                if info is not None:
                    yield info

    def list_dirs(self, directory_uri: str) -> list[str]:
        """See Storage.list_dirs."""
        path = path_of(directory_uri)
        with _file_errors(directory_uri):
            return (
                sorted(child.as_uri() for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
            )

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """See Storage.delete."""
        path = path_of(uri)
        with _file_errors(uri), _locked(path.parent):
            if if_generation_match is not None and path.stat().st_mtime_ns != if_generation_match:
                raise PreconditionFailedError(f"{uri} is not in generation {if_generation_match}.")
            path.unlink()

    def copy(self, source_uri: str, target_uri: str) -> ObjectInfo:
        """See Storage.copy."""
        source = path_of(source_uri)
        if not source.is_file():
            raise ObjectNotFoundError(f"{source_uri} does not exist.")
        return storage_for(target_uri).upload(source, target_uri)

    def download(self, uri: str, path: Path) -> None:
        """See Storage.download."""
        with _file_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_of(uri), path)

    def upload(self, path: Path, uri: str) -> ObjectInfo:
        """See Storage.upload."""
        try:
            data = path.read_bytes()
        except OSError as exc:  # of a file that is not the object
            raise StorageError(f"{uri}: {exc}") from exc
        return self.write(uri, data)

    @staticmethod
    def _publish(temporary: Path, path: Path, uri: str, if_generation_match: int | None) -> None:
        if if_generation_match is None:
            temporary.replace(path)
            return
        if if_generation_match == 0:
            try:
                path.hardlink_to(temporary)  # fails when the name exists, also between processes and over NFS
            except FileExistsError as exc:
                raise PreconditionFailedError(f"{uri} exists already.") from exc
            return
        with _locked(path.parent):
            standing = path.stat().st_mtime_ns if path.exists() else 0
            if standing != if_generation_match:
                raise PreconditionFailedError(
                    f"{uri} is in generation {standing}, not {if_generation_match}."
                )
            temporary.replace(path)


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


def _info(uri: str, blob: Any) -> ObjectInfo:
    return ObjectInfo(uri, int(blob.size), int(blob.generation), str(blob.crc32c))


def _file_crc32c(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode()


@contextmanager
def _file_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
        raise ObjectNotFoundError(f"{uri} does not exist: {exc.strerror}.") from exc
    except OSError as exc:
        raise StorageError(f"{uri}: {exc}") from exc


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One conditional writer at a time in a directory; the lock goes with the process that holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
