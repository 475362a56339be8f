"""Payloads on the wire: bodies streamed in, ranges streamed out, and the headers that both APIs share."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from email.utils import format_datetime
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock_local.storage.blobs import COPY_BYTES, ExpectedHashes
from penstock_local.storage.errors import (
    InvalidRequestError,
    NotModifiedError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    UnsupportedError,
)
from penstock_local.storage.resources import Attributes, Preconditions, StoredObject
from penstock_local.storage.store import ObjectStore

_RANGE = re.compile(r"bytes=(?P<first>\d*)-(?P<last>\d*)")
_HARMLESS_HEADERS = frozenset(
    {"x-goog-api-client", "x-goog-gcs-idempotency-token", "x-goog-request-params", "x-goog-user-project"}
)
_MAX_HEAD_BYTES = 1 << 20
"""Of the metadata in front of the payload of a multipart upload."""


async def receive(stream: AsyncIterator[bytes], write: Callable[[bytes], None]) -> None:
    """Hand a body to `write` in pieces of about 1 MiB, in the thread pool: hashing and disk block.

    What arrived before the client went away has been written when ClientDisconnect is raised.
    """
    pieces: list[bytes] = []
    size = 0

    async def flush() -> None:
        nonlocal size
        if size:
            await run_in_threadpool(write, b"".join(pieces))
            pieces.clear()
            size = 0

    try:
        async for piece in stream:
            pieces.append(piece)
            size += len(piece)
            if size >= COPY_BYTES:
                await flush()
    finally:
        await flush()


async def receive_object(
    store: ObjectStore,
    stream: AsyncIterator[bytes],
    bucket: str,
    name: str,
    *,
    attributes: Attributes,
    preconditions: Preconditions,
    expected: ExpectedHashes,
) -> StoredObject:
    """Store a body as one object, or nothing of it: what is raised here leaves the object as it was."""
    staged = await run_in_threadpool(store.stage)
    try:
        await receive(stream, staged.write)
    except BaseException:
        staged.discard()
        raise
    return await run_in_threadpool(
        store.commit,
        staged,
        bucket,
        name,
        attributes=attributes,
        preconditions=preconditions,
        expected=expected,
    )


class MultipartRelated:
    """A body of two parts, metadata and payload, split as it streams in.

    Lines may end in LF alone; some clients write them so.
    """

    def __init__(self, stream: AsyncIterator[bytes], boundary: str) -> None:
        self._stream = stream
        self._delimiter = b"--" + boundary.encode("latin-1")
        self._buffer = b""

    async def head(self) -> tuple[bytes, str | None]:
        """The metadata, and the payload's content type. Call it before `payload`."""
        opening = await self._line()
        if opening.rstrip(b"\r\n") != self._delimiter:
            raise InvalidRequestError("the multipart body does not begin with its boundary.")
        newline = b"\r\n" if opening.endswith(b"\r\n") else b"\n"
        self._delimiter = newline + self._delimiter
        await self._part_headers()
        metadata = await self._until(self._delimiter + newline)
        headers = await self._part_headers()
        return metadata, headers.get("content-type")

    async def payload(self) -> AsyncIterator[bytes]:
        """The payload, without the boundary behind it. Raises InvalidRequestError when the body ends early."""
        closing = self._delimiter + b"--"
        while (end := self._buffer.find(self._delimiter)) < 0:
            safe = max(0, len(self._buffer) - len(closing))
            if safe:
                yield self._buffer[:safe]
                self._buffer = self._buffer[safe:]
            await self._more()
        yield self._buffer[:end]
        self._buffer = self._buffer[end:]
        while len(self._buffer) < len(closing):
            await self._more()
        if not self._buffer.startswith(closing):
            raise InvalidRequestError("the multipart body has more than two parts.")
        async for _ in self._stream:
            pass

    async def _part_headers(self) -> dict[str, str]:
        headers = {}
        while line := (await self._line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return headers

    async def _line(self) -> bytes:
        return await self._until(b"\n") + b"\n"

    async def _until(self, separator: bytes) -> bytes:
        while (end := self._buffer.find(separator)) < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise InvalidRequestError(
                    f"the metadata of a multipart upload exceeds {_MAX_HEAD_BYTES} bytes."
                )
            await self._more()
        found, self._buffer = self._buffer[:end], self._buffer[end + len(separator) :]
        return found

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._stream)
        except StopAsyncIteration as exc:
            raise InvalidRequestError("the multipart body ends before its closing boundary.") from exc


class PayloadResponse(Response):
    """An object's payload, or a range of it, streamed in pieces of 1 MiB; closes the file whatever happens."""

    def __init__(
        self, file: BinaryIO, found: StoredObject, headers: Mapping[str, str], byte_range: str | None
    ) -> None:
        self._file = file
        first, last = _parse_range(byte_range, found.size) if byte_range else (0, found.size - 1)
        self._first, self._length = first, last - first + 1
        self.status_code = 206 if byte_range else 200
        self.background = None
        span = {"content-range": f"bytes {first}-{last}/{found.size}"} if byte_range else {}
        self.init_headers({**headers, **span, "content-length": str(self._length)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        """Send it. A HEAD request gets the headers alone."""
        with self._file:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            remaining = 0 if scope["method"] == "HEAD" else self._length
            await run_in_threadpool(self._file.seek, self._first)
            while remaining:
                piece = await run_in_threadpool(self._file.read, min(COPY_BYTES, remaining))
                remaining -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def check_headers(headers: Mapping[str, str], known: frozenset[str] = frozenset()) -> None:
    """Raises UnsupportedError for a `x-goog-` header that would be ignored."""
    for name in headers:
        if name.startswith("x-goog-") and name not in known and name not in _HARMLESS_HEADERS:
            raise UnsupportedError(f"The header {name} is not supported for this request by the stand-in.")


def check_conditional_headers(method: str, headers: Mapping[str, str]) -> None:
    """Raises UnsupportedError for conditions of HTTP itself that would be ignored."""
    writing = {"if-match", "if-none-match"} if method not in {"GET", "HEAD"} else set()
    for name in {"if-modified-since", "if-unmodified-since", "if-range", *writing}:
        if name in headers:
            raise UnsupportedError(
                f"The header {name} is not supported for {method}; use generation preconditions."
            )


def expected_hashes(headers: Mapping[str, str]) -> ExpectedHashes:
    """What `x-goog-hash` and `Content-MD5` say about the body. Raises InvalidRequestError."""
    expected: list[tuple[str, str]] = []
    for item in headers.get("x-goog-hash", "").split(","):
        algorithm, _, digest = item.strip().partition("=")
        if algorithm in {"crc32c", "md5"}:
            expected.append((algorithm, digest))
        elif algorithm:
            raise InvalidRequestError(f"x-goog-hash names {algorithm!r}; it takes crc32c and md5.")
    if "content-md5" in headers:
        expected.append(("md5", headers["content-md5"]))
    return tuple(expected)


def object_headers(found: StoredObject, *, etag: str) -> dict[str, str]:
    """What a download says about the object."""
    attributes = found.attributes
    hashes = f"crc32c={found.crc32c}" + (f",md5={found.md5}" if found.md5 else "")
    headers = {
        "accept-ranges": "bytes",
        "cache-control": attributes.cache_control,
        "content-disposition": attributes.content_disposition,
        "content-encoding": attributes.content_encoding,
        "content-language": attributes.content_language,
        "content-type": attributes.content_type,
        "etag": etag,
        "last-modified": format_datetime(found.updated, usegmt=True),
        "x-goog-custom-time": attributes.custom_time,
        "x-goog-generation": str(found.generation),
        "x-goog-hash": hashes,
        "x-goog-metageneration": str(found.metageneration),
        "x-goog-storage-class": attributes.storage_class,
        "x-goog-stored-content-encoding": attributes.content_encoding or "identity",
        "x-goog-stored-content-length": str(found.size),
        **{f"x-goog-meta-{key}": value for key, value in attributes.metadata.items()},
    }
    return {name: value for name, value in headers.items() if value is not None}


def check_read_conditions(headers: Mapping[str, str], found: StoredObject, *, etag: str) -> None:
    """The conditional headers of a read. Raises PreconditionFailedError, NotModifiedError or UnsupportedError."""
    wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
    if wanted is not None and not _names_etag(wanted, etag):
        raise PreconditionFailedError(f"If-Match is {wanted}, and the ETag of {found.uri} is {etag}.")
    if unwanted is not None and _names_etag(unwanted, etag):
        raise NotModifiedError(f"If-None-Match is {unwanted}, which is the ETag of {found.uri}.")
    if found.attributes.content_encoding == "gzip" and "gzip" not in headers.get("accept-encoding", ""):
        raise UnsupportedError(
            f"{found.uri} is stored with Content-Encoding gzip, and decompression while serving is not supported; "
            "send Accept-Encoding: gzip."
        )


def _names_etag(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag.strip('"') in {item.strip().strip('"') for item in header.split(",")}


def _parse_range(value: str, size: int) -> tuple[int, int]:
    """First and last byte, both inclusive."""
    match = _RANGE.fullmatch(value.strip().replace(" ", ""))
    if match is None or not (match["first"] or match["last"]):
        raise UnsupportedError(
            f"Range: {value} is not supported; ask for one range of bytes, as in bytes=0-99."
        )
    if not match["first"]:
        first, last = max(0, size - int(match["last"])), size - 1
    else:
        first, last = int(match["first"]), min(int(match["last"] or size - 1), size - 1)
        if match["last"] and int(match["last"]) < first:
            raise InvalidRequestError(f"Range: {value} ends before it starts.")
    if first >= size:
        raise RangeNotSatisfiableError(f"Range: {value} starts behind the last of {size} bytes.", size=size)
    return first, last
