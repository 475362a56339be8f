"""Uploads over the JSON API: in one request (media, multipart) or in many (resumable)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from email.message import Message
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock_local.storage.blobs import ExpectedHashes
from penstock_local.storage.errors import InvalidRequestError, UnsupportedError
from penstock_local.storage.json_api import (
    PRECONDITIONS,
    Call,
    attributes_of,
    check_parameters,
    object_json,
    read_hashes,
)
from penstock_local.storage.media import (
    MultipartRelated,
    check_headers,
    expected_hashes,
    receive,
    receive_object,
)
from penstock_local.storage.resources import Attributes
from penstock_local.storage.store import ObjectStore
from penstock_local.storage.uploads import CHUNK_MULTIPLE_BYTES, ResumableUpload, ResumableUploads

_CONTENT_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-(?P<last>\d+)|\*)/(?:(?P<size>\d+)|\*)")
_PARAMETERS = PRECONDITIONS | {"uploadType", "name", "contentEncoding"}
_HEADERS = frozenset({"x-goog-hash"})


class JsonUploads:
    """Everything below `/upload/storage/v1`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._sessions = ResumableUploads(store)

    async def handle(self, request: Request, bucket: str) -> Response:
        """Answer one request. Raises StorageError."""
        check_headers(request.headers, _HEADERS)
        query = request.query_params
        if "upload_id" in query:
            check_parameters(query, _PARAMETERS | {"upload_id"})
            return await self._continue(request, self._sessions.get(query["upload_id"]))
        check_parameters(query, _PARAMETERS)
        begin = {"media": self._media, "multipart": self._multipart, "resumable": self._begin}
        if request.method != "POST" or query.get("uploadType") not in begin:
            raise InvalidRequestError(
                f"{request.method} with uploadType={query.get('uploadType')!r}: "
                f"uploads are POSTed with one of {', '.join(begin)}."
            )
        return await begin[query["uploadType"]](request, bucket)

    async def _media(self, request: Request, bucket: str) -> Response:
        call = Call.of(request)
        attributes = Attributes(content_type=request.headers.get("content-type", Attributes().content_type))
        return await self._store_body(
            call, bucket, {}, attributes, request.stream(), expected_hashes(call.headers)
        )

    async def _multipart(self, request: Request, bucket: str) -> Response:
        call = Call.of(request)
        parts = MultipartRelated(request.stream(), _boundary(request.headers.get("content-type", "")))
        head, content_type = await parts.head()
        body = replace(call, body=head).json()
        attributes = attributes_of({"contentType": content_type} | body if content_type else body)
        hashes = (*expected_hashes(call.headers), *read_hashes(body))
        return await self._store_body(call, bucket, body, attributes, parts.payload(), hashes)

    async def _store_body(
        self,
        call: Call,
        bucket: str,
        body: dict[str, Any],
        attributes: Attributes,
        stream: AsyncIterator[bytes],
        expected: ExpectedHashes,
    ) -> Response:
        name, attributes, preconditions = _name(call, body), _encoded(call, attributes), call.preconditions()
        written = await receive_object(
            self._store,
            stream,
            bucket,
            name,
            attributes=attributes,
            preconditions=preconditions,
            expected=expected,
        )
        return JSONResponse(object_json(written, call.base_url))

    async def _begin(self, request: Request, bucket: str) -> Response:
        call = Call.of(request, await request.body())
        body = call.json()
        declared = (
            {"contentType": call.headers["x-upload-content-type"]}
            if "x-upload-content-type" in call.headers
            else {}
        )
        attributes = _encoded(call, attributes_of(declared | body))
        size = call.headers.get("x-upload-content-length")
        if size is not None and not size.isdecimal():
            raise InvalidRequestError(f"X-Upload-Content-Length: {size!r} is not a number of bytes.")
        session = await run_in_threadpool(
            self._sessions.begin,
            bucket,
            _name(call, body),
            attributes=attributes,
            preconditions=call.preconditions(),
            expected=(*expected_hashes(call.headers), *read_hashes(body)),
            size=None if size is None else int(size),
        )
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&upload_id={session.id}"
        return Response(headers={"location": call.base_url + path, "x-guploader-uploadid": session.id})

    async def _continue(self, request: Request, session: ResumableUpload) -> Response:
        async with session.lock:
            if request.method == "DELETE":
                await run_in_threadpool(self._sessions.cancel, session)
                return Response(status_code=499)
            if request.method not in {"PUT", "POST"}:
                raise UnsupportedError(f"{request.method} of a resumable upload session is not supported.")
            if session.result is None:
                await self._append(request, session)
            if session.result is None:
                return _progress(session)
            return JSONResponse(object_json(session.result, Call.of(request).base_url))

    async def _append(self, request: Request, session: ResumableUpload) -> None:
        """Take a chunk. Bytes that came before are skipped: the client repeats what it does not know to be stored."""
        first, total = _chunk(request, session)
        if first is not None:
            if first > session.staged.size:
                raise InvalidRequestError(
                    f"Invalid request. The chunk starts at byte {first}; {session.staged.size} bytes are stored. "
                    "Ask for the status and go on from there."
                )
            await receive(_skip(request.stream(), session.staged.size - first), session.staged.write)
        if total is not None and session.staged.size > total:
            await run_in_threadpool(self._sessions.cancel, session)
            raise InvalidRequestError(f"{session.staged.size} bytes arrived for an object of {total} bytes.")
        if total == session.staged.size:
            await run_in_threadpool(self._sessions.finish, session, expected_hashes(request.headers))
        elif first is not None and session.staged.size % CHUNK_MULTIPLE_BYTES:
            raise InvalidRequestError(
                f"{session.staged.size} bytes arrived and the upload goes on; "
                f"every chunk but the last must be a multiple of {CHUNK_MULTIPLE_BYTES} bytes."
            )


def _chunk(request: Request, session: ResumableUpload) -> tuple[int | None, int | None]:
    """The position of the chunk, None when there is no chunk, and the size of the object, None when not known yet."""
    header = request.headers.get("content-range")
    length = request.headers.get("content-length")
    if header is None:
        return 0, session.size if session.size is not None or length is None else int(length)
    match = _CONTENT_RANGE.fullmatch(header)
    if match is None:
        raise InvalidRequestError(f"Failed to parse Content-Range header: {header!r}.")
    total = session.size if match["size"] is None else int(match["size"])
    if session.size not in (None, total):
        raise InvalidRequestError(f"Content-Range: {header} contradicts the declared {session.size} bytes.")
    if match["first"] is None:
        return None, None if match["size"] is None else total
    declared = int(match["last"]) - int(match["first"]) + 1
    if length is not None and int(length) != declared:
        raise InvalidRequestError(f"Content-Range: {header} does not fit a body of {length} bytes.")
    return int(match["first"]), total


def _progress(session: ResumableUpload) -> Response:
    stored = session.staged.size
    return Response(status_code=308, headers={"range": f"bytes=0-{stored - 1}"} if stored else {})


async def _skip(stream: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    async for piece in stream:
        yield piece[count:]
        count = max(0, count - len(piece))


def _boundary(content_type: str) -> str:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/related" or not boundary:
        raise InvalidRequestError(
            f"Content-Type is {content_type!r}; uploadType=multipart takes multipart/related with a boundary."
        )
    return boundary


def _name(call: Call, body: dict[str, Any]) -> str:
    name = body.get("name") or call.query.get("name")
    if not isinstance(name, str):
        raise InvalidRequestError("Required: the object's name, as the parameter `name` or in the metadata.")
    if call.query.get("name", name) != name:
        raise InvalidRequestError(
            f"The parameter name={call.query['name']} contradicts {name!r} in the metadata."
        )
    return name


def _encoded(call: Call, attributes: Attributes) -> Attributes:
    encoding = call.query.get("contentEncoding")
    return replace(attributes, content_encoding=encoding) if encoding else attributes
