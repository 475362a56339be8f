"""Cloud Storage through google-cloud-storage, and through obstore where that costs less."""

from __future__ import annotations

import itertools
import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock_trainer.storage.files import disk_errors
from penstock_trainer.storage.objects import (
    PIECE_BYTES,
    Buffer,
    Crc32c,
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    crc32c,
    split_gs,
)
from penstock_trainer.storage.transfers import DamagedError, ObstoreTransfer, SessionTransfer, Transfer

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

log = logging.getLogger(__name__)
T = TypeVar("T")

OBSTORE_BYTES = 8 << 20
"""From here on obstore's savings are worth its second request: with TLS 5.3 ms of CPU time instead of 7.3 ms."""
TRIES_WHEN_DAMAGED = 3
"""Of a transfer whose bytes arrive changed; more would hide broken hardware."""
_MAX_REWRITES = 10_000
"""Calls of one copy; each moves a GiB or more, and the largest object has 5 TiB."""


class GcsStorage:
    """Cloud Storage, with application default credentials.

    Small payloads and all reads go over the HTTP session of google-cloud-storage. Payloads from OBSTORE_BYTES on go
    through obstore on their first try, where it is installed, and over the session after that. Uploads from memory are
    single requests, of which nothing remains when they are cut off; an upload session of a large file (`upload`) is not
    visible, costs nothing and expires by itself.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        deadline_seconds: float = 300.0,
        obstore_bytes: int | None = OBSTORE_BYTES,
    ) -> None:
        """`deadline_seconds`: for how long an object's transient failures are retried. `obstore_bytes` None: never."""
        # Imported here: a program that only touches file:// starts half a second earlier.
        from google.cloud.storage import Client
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._client = client or Client()
        self._deadline_seconds = deadline_seconds
        # A conditional write that is retried after a lost answer finds its own object; see `write`.
        self._retry = DEFAULT_RETRY.with_delay(
            initial=min(0.5, deadline_seconds / 100), maximum=30.0, multiplier=2.0
        ).with_timeout(deadline_seconds)
        self._translate = _Translation(deadline_seconds)
        self._session = SessionTransfer(self._client, timeout_seconds=deadline_seconds)
        self._obstore_bytes = obstore_bytes
        self._obstore = None if obstore_bytes is None else self._obstore_transfer()

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """See Storage.read."""
        if length == 0:
            return b""
        bucket, name = split_gs(uri)
        with self._translate(uri, "storage.objects.get"):
            data = self._try(uri, lambda: self._session.get(bucket, name, start, length, generation))
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
        known_crc32c: str | None = None,
    ) -> ObjectInfo:
        """See Storage.write."""
        bucket, name = split_gs(uri)
        view = memoryview(data).cast("B")
        checksum = known_crc32c or crc32c(view)
        transfers = self._transfers(len(view))

        def put() -> int:
            return next(transfers).put(
                bucket,
                name,
                view,
                crc32c=checksum,
                if_generation_match=if_generation_match,
                content_type=content_type,
            )

        try:
            with self._translate(uri, "storage.objects.create", "storage.objects.delete (to overwrite)"):
                return ObjectInfo(uri, len(view), self._try(uri, put), checksum)
        except PreconditionFailedError:
            return self._own(uri, len(view), checksum)

    def stat(self, uri: str) -> ObjectInfo | None:
        """See Storage.stat. A bucket that does not exist is a StorageError."""
        blob = self._blob(uri)
        try:
            with self._translate(uri, "storage.objects.get"):
                blob.reload(retry=self._retry)
        except ObjectNotFoundError:
            return None
        return _info(uri, blob)

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """See Storage.list_objects."""
        bucket, prefix = split_gs(prefix_uri)
        with self._translate(prefix_uri, "storage.objects.list"):
            for blob in self._client.list_blobs(bucket, prefix=prefix, retry=self._retry):
                yield _info(f"gs://{bucket}/{blob.name}", blob)

    def list_dirs(self, directory_uri: str) -> list[str]:
        """See Storage.list_dirs."""
        bucket, prefix = split_gs(directory_uri.rstrip("/") + "/")
        with self._translate(directory_uri, "storage.objects.list"):
            pages = self._client.list_blobs(bucket, prefix=prefix, delimiter="/", retry=self._retry).pages
            found = {name for page in pages for name in page.prefixes}
        return sorted(f"gs://{bucket}/{name.rstrip('/')}" for name in found)

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """See Storage.delete."""
        with self._translate(uri, "storage.objects.delete"):
            self._blob(uri).delete(if_generation_match=if_generation_match, retry=self._retry)

    def copy(
        self,
        source_uri: str,
        target_uri: str,
        *,
        source_generation: int | None = None,
        if_generation_match: int | None = None,
    ) -> ObjectInfo:
        """See Storage.copy."""
        source, target = self._blob(source_uri, generation=source_generation), self._blob(target_uri)
        try:
            with self._translate(
                f"{source_uri} to {target_uri}",
                "storage.objects.get on the source",
                "storage.objects.create on the target",
            ):
                token = None
                for _ in range(_MAX_REWRITES):
                    token, _, _ = target.rewrite(
                        source, token=token, if_generation_match=if_generation_match, retry=self._retry
                    )
                    if token is None:
                        return _info(target_uri, target)
        except PreconditionFailedError:
            copied = self.stat(source_uri)
            if copied is None or source_generation not in (None, copied.generation):
                raise
            return self._own(target_uri, copied.size, copied.crc32c)
        raise StorageError(f"{source_uri} was not copied to {target_uri} in {_MAX_REWRITES} calls.")

    def download(self, uri: str, path: Path) -> None:
        """See Storage.download."""
        found = self.stat(uri)
        if found is None:
            raise ObjectNotFoundError(f"{uri} does not exist.")
        for _ in range(TRIES_WHEN_DAMAGED):
            if self._download(found, path) == found.crc32c:
                return
        path.unlink()
        raise ObjectCorruptError(f"{uri} has CRC32C {found.crc32c}, what was read of it has another one.")

    def upload(self, path: Path, uri: str, *, if_generation_match: int | None = None) -> ObjectInfo:
        """See Storage.upload. From PIECE_BYTES on it is a resumable upload, which goes on where it was cut off."""
        with disk_errors(uri, path):
            size = path.stat().st_size
            if size < PIECE_BYTES:
                return self.write(uri, path.read_bytes(), if_generation_match=if_generation_match)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                checksum = crc32c(memoryview(mapped))
        blob = self._blob(uri)
        blob.chunk_size = PIECE_BYTES  # of each request; by default the library holds 100 MiB
        blob.crc32c = checksum  # the server refuses other bytes

        def put() -> int:
            blob.upload_from_filename(
                str(path), checksum=None, if_generation_match=if_generation_match, retry=self._retry
            )
            return int(blob.generation)

        try:
            with disk_errors(uri, path), self._translate(uri, "storage.objects.create"):
                return ObjectInfo(uri, size, self._try(uri, put), checksum)
        except PreconditionFailedError:
            return self._own(uri, size, checksum)

    def _try(self, uri: str, call: Callable[[], T]) -> T:
        """Its result, tried again after transient failures and, a few times, after damage."""
        damaged = 0

        def attempt() -> T:
            nonlocal damaged
            try:
                return call()
            except Exception as exc:
                if not _is_damage(exc):
                    raise
                damaged += 1
                log.warning("%s: %s (try %d of %d)", uri, exc, damaged, TRIES_WHEN_DAMAGED)
                if damaged == TRIES_WHEN_DAMAGED:
                    raise ObjectCorruptError(f"{uri} is corrupt {damaged} times in a row: {exc}") from exc
                raise DamagedError(str(exc)) from exc

        result: T = self._retry(attempt)()
        return result

    def _transfers(self, size: int) -> Iterator[Transfer]:
        """The way of each try."""
        first = [self._obstore] if self._obstore and size >= (self._obstore_bytes or 0) else []
        return itertools.chain(first, itertools.repeat(self._session))

    def _obstore_transfer(self) -> ObstoreTransfer | None:
        try:
            # Half of the deadline: when nothing moves any more, the session still has a try.
            return ObstoreTransfer(self._client, self._session, timeout_seconds=self._deadline_seconds / 2)
        except ImportError:
            return None

    def _own(self, uri: str, size: int, checksum: str) -> ObjectInfo:
        """After a condition failed: an object of these bytes is ours, written by a try whose answer was lost."""
        standing = self.stat(uri)
        if standing is None or (standing.crc32c, standing.size) != (checksum, size):
            raise PreconditionFailedError(
                f"{uri} is not in the generation that was expected, but in {standing.generation if standing else 'none'}."
            )
        return standing

    def _download(self, found: ObjectInfo, path: Path) -> str:
        """CRC32C of what was written."""
        checksum = Crc32c()
        with disk_errors(found.uri, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("wb")
        try:
            with file:
                for start in range(0, found.size, PIECE_BYTES):
                    length = min(PIECE_BYTES, found.size - start)
                    piece = self.read(found.uri, start=start, length=length, generation=found.generation)
                    checksum.update(piece)
                    with disk_errors(found.uri, path):
                        file.write(piece)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return checksum.base64

    def _blob(self, uri: str, *, generation: int | None = None) -> Blob:
        bucket, name = split_gs(uri)
        return self._client.bucket(bucket).blob(name, generation=generation)


class _Translation:
    """Of what google-cloud-storage raises into StorageError."""

    def __init__(self, deadline_seconds: float) -> None:
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from urllib3.exceptions import HTTPError

        self._deadline_seconds = deadline_seconds
        self._api = exceptions
        self._auth_error = GoogleAuthError
        # OSError: everything of requests. HTTPError: bodies are read from urllib3 directly.
        self._network_errors = (HTTPError, OSError)

    @contextmanager
    def __call__(self, uri: str, *permissions: str) -> Iterator[None]:
        """`permissions`: those that the calls inside need."""
        try:
            yield
        except self._api.NotFound as exc:
            if "bucket does not exist" in exc.message:
                raise StorageError(
                    f"{uri}: the bucket does not exist. Create it first, or correct the name."
                ) from exc
            raise ObjectNotFoundError(f"{uri} does not exist: {exc.message}") from exc
        except self._api.PreconditionFailed as exc:
            raise PreconditionFailedError(
                f"{uri} is not in the generation that was expected: {exc.message}"
            ) from exc
        except (self._api.Unauthorized, self._api.Forbidden) as exc:
            raise StorageError(
                f"{uri}: not permitted ({exc.code}): {exc.message} This needs {' and '.join(permissions)}: give the "
                "account that this process runs as roles/storage.objectUser on the bucket, or name another bucket."
            ) from exc
        except self._api.RetryError as exc:
            raise StorageUnavailableError(
                f"{uri}: Cloud Storage could not be used for {self._deadline_seconds:g} s, the last failure was: {exc.cause}"
            ) from exc
        except self._api.RequestRangeNotSatisfiable as exc:
            raise ObjectCorruptError(
                f"{uri} ends before the range that was asked for: {exc.message}"
            ) from exc
        except self._auth_error as exc:
            if exc.retryable:
                raise StorageUnavailableError(f"{uri}: no access token: {exc}") from exc
            raise StorageError(
                f"{uri}: the credentials do not work: {exc} Check GOOGLE_APPLICATION_CREDENTIALS, or log in with "
                "gcloud auth application-default login."
            ) from exc
        except (self._api.GoogleAPIError, *self._network_errors) as exc:
            raise StorageError(f"{uri}: {exc}") from exc


def _is_damage(error: Exception) -> bool:
    """Also what the JSON API answers to bytes that do not have the CRC32C of their description."""
    from google.api_core.exceptions import BadRequest

    return isinstance(error, DamagedError) or (
        isinstance(error, BadRequest) and "crc32c" in error.message.lower()
    )


def _info(uri: str, blob: Any) -> ObjectInfo:
    return ObjectInfo(uri, int(blob.size), int(blob.generation), str(blob.crc32c))
