"""Cloud Storage through google-cloud-storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_trainer.storage.objects import (
    Buffer,
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    crc32c,
    split_gs,
)

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client


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
        from penstock_trainer.storage import storage_for

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


def _info(uri: str, blob: Any) -> ObjectInfo:
    return ObjectInfo(uri, int(blob.size), int(blob.generation), str(blob.crc32c))
