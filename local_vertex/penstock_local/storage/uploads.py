"""Uploads that take several requests: resumable sessions (JSON API) and multipart uploads (XML API).

They live in memory, as long as the server; their bytes are staged in the store and go with it.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_local.storage.blobs import ExpectedHashes, StagedBlob, hex_digest
from penstock_local.storage.errors import (
    InvalidPartError,
    InvalidRequestError,
    StorageError,
    UploadNotFoundError,
)
from penstock_local.storage.resources import Attributes, Preconditions, StoredObject
from penstock_local.storage.store import ObjectStore

CHUNK_MULTIPLE_BYTES = 256 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PARTS = 10_000
_KEPT_SESSIONS = 4096


@dataclass(kw_only=True)
class ResumableUpload:
    """One session. Whoever writes to it holds `lock`: a client may retry a chunk that is still on its way."""

    bucket: str
    name: str
    attributes: Attributes
    preconditions: Preconditions
    expected: ExpectedHashes
    staged: StagedBlob
    size: int | None
    """Declared when the session began; None when the client did not know."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    result: StoredObject | None = None
    """Set once the object is written; the client may ask again."""


class ResumableUploads:
    """Sessions by id. Only the oldest of 4096 is ever forgotten by itself."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._sessions: OrderedDict[str, ResumableUpload] = OrderedDict()
        self._lock = threading.Lock()

    def begin(
        self,
        bucket: str,
        name: str,
        *,
        attributes: Attributes,
        preconditions: Preconditions,
        expected: ExpectedHashes,
        size: int | None,
    ) -> ResumableUpload:
        """Open a session; the preconditions are checked now and again when it is finished."""
        self._store.check(bucket, name, preconditions)
        session = ResumableUpload(
            bucket=bucket,
            name=name,
            attributes=attributes,
            preconditions=preconditions,
            expected=expected,
            staged=self._store.stage(),
            size=size,
        )
        with self._lock:
            self._sessions[session.id] = session
            oldest = self._sessions.popitem(last=False)[1] if len(self._sessions) > _KEPT_SESSIONS else None
        if oldest and oldest.result is None:
            oldest.staged.discard()
        return session

    def get(self, upload_id: str) -> ResumableUpload:
        """Raises UploadNotFoundError."""
        with self._lock:
            if upload_id not in self._sessions:
                raise UploadNotFoundError(f"No resumable upload session {upload_id!r}; begin a new one.")
            return self._sessions[upload_id]

    def finish(self, session: ResumableUpload, expected: ExpectedHashes) -> StoredObject:
        """Write the object. When it is refused, the session is over."""
        try:
            session.result = self._store.commit(
                session.staged,
                session.bucket,
                session.name,
                attributes=session.attributes,
                preconditions=session.preconditions,
                expected=(*session.expected, *expected),
            )
        except StorageError:
            self.cancel(session)
            raise
        return session.result

    def cancel(self, session: ResumableUpload) -> None:
        """End a session and drop its bytes."""
        with self._lock:
            self._sessions.pop(session.id, None)
        if session.result is None:
            session.staged.discard()


@dataclass(kw_only=True)
class MultipartUpload:
    """One multipart upload and the parts that have arrived, by number."""

    bucket: str
    name: str
    attributes: Attributes
    parts: dict[int, StagedBlob] = field(default_factory=dict)


class MultipartUploads:
    """Multipart uploads by id. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._uploads: dict[str, MultipartUpload] = {}
        self._lock = threading.Lock()

    def begin(self, bucket: str, name: str, attributes: Attributes) -> str:
        """Returns the id of the upload."""
        self._store.check(bucket, name, Preconditions())
        upload_id = uuid.uuid4().hex
        with self._lock:
            self._uploads[upload_id] = MultipartUpload(bucket=bucket, name=name, attributes=attributes)
        return upload_id

    def put_part(self, upload_id: str, bucket: str, name: str, number: int, part: StagedBlob) -> None:
        """Add a part, or replace the one of that number."""
        if not 1 <= number <= MAX_PARTS:
            raise InvalidRequestError(f"partNumber is {number}; it must be between 1 and {MAX_PARTS}.")
        with self._lock:
            upload = self._find(upload_id, bucket, name)
            replaced = upload.parts.pop(number, None)
            upload.parts[number] = part
        if replaced:
            replaced.discard()

    def complete(
        self,
        upload_id: str,
        bucket: str,
        name: str,
        parts: Sequence[tuple[int, str]],
        expected: ExpectedHashes,
    ) -> StoredObject:
        """Join the parts, given as number and ETag; what was uploaded and not named is dropped.

        Raises InvalidPartError, after which the upload still stands.
        """
        with self._lock:
            upload = self._find(upload_id, bucket, name)
            chosen = _choose(upload, parts)
            del self._uploads[upload_id]
        staged = self._store.stage(with_md5=False)
        try:
            for part in chosen:
                with part.path.open("rb", buffering=0) as file:
                    staged.write_from(file)
                part.discard()
        except BaseException:
            staged.discard()
            raise
        finally:
            _discard_parts(upload)
        return self._store.commit(staged, bucket, name, attributes=upload.attributes, expected=expected)

    def abort(self, upload_id: str, bucket: str, name: str) -> None:
        """Drop an upload and its parts."""
        with self._lock:
            upload = self._find(upload_id, bucket, name)
            del self._uploads[upload_id]
        _discard_parts(upload)

    def _find(self, upload_id: str, bucket: str, name: str) -> MultipartUpload:
        upload = self._uploads.get(upload_id)
        if upload is None or (upload.bucket, upload.name) != (bucket, name):
            raise UploadNotFoundError(
                f"No multipart upload {upload_id!r} of {bucket}/{name}; begin a new one."
            )
        return upload


def _discard_parts(upload: MultipartUpload) -> None:
    for part in upload.parts.values():
        part.discard()


def _choose(upload: MultipartUpload, parts: Sequence[tuple[int, str]]) -> Sequence[StagedBlob]:
    numbers = [number for number, _ in parts]
    if not parts or numbers != sorted(set(numbers)):
        raise InvalidPartError(
            f"The parts must be named once each, in ascending order; given were {numbers}."
        )
    for number, etag in parts:
        part = upload.parts.get(number)
        if part is None or hex_digest(part.md5) != etag.strip('"'):
            raise InvalidPartError(f"Part {number} with ETag {etag} was not uploaded.")
        if part.size < MIN_PART_BYTES and number != numbers[-1]:
            raise InvalidPartError(
                f"Part {number} has {part.size} bytes; every part but the last needs {MIN_PART_BYTES} or more."
            )
    return [upload.parts[number] for number in numbers]
