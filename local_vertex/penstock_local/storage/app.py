"""The ASGI app: sends each request to its API and turns errors into answers.

It checks no credentials; the front door does that for every request.
"""

from __future__ import annotations

import contextlib
import logging
import re

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock_local.storage.batch import run_batch
from penstock_local.storage.errors import StorageError
from penstock_local.storage.json_api import PRECONDITIONS, Call, JsonApi, check_parameters, decode
from penstock_local.storage.json_uploads import JsonUploads
from penstock_local.storage.media import (
    PayloadResponse,
    check_conditional_headers,
    check_headers,
    check_read_conditions,
    object_headers,
)
from penstock_local.storage.store import ObjectStore
from penstock_local.storage.xml_api import XmlApi, error_document

logger = logging.getLogger(__name__)

_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o")
_DOWNLOAD = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_JSON_PATHS = (
    "/storage/v1/",
    "/upload/storage/v1/",
    "/resumable/upload/storage/v1/",
    "/download/storage/v1/",
    "/batch/",
)


def build_app(store: ObjectStore, *, project_id: str, project_number: int) -> Starlette:
    """Cloud Storage over the JSON and the XML API. All buckets belong to the one project given."""
    logger.info("serving Cloud Storage for project %s (%d)", project_id, project_number)
    wire = _Wire(store, project_number)
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", wire.answer, methods=methods)])


class _Wire:
    def __init__(self, store: ObjectStore, project_number: int) -> None:
        self._store = store
        self._json = JsonApi(store, project_number=project_number)
        self._uploads = JsonUploads(store)
        self._xml = XmlApi(store)

    async def answer(self, request: Request) -> Response:
        # Starlette's own path is decoded: it cannot tell the object `a/b` from the method `b` of the object `a`.
        path = request.scope["raw_path"].decode("latin-1")
        is_json = path.startswith(_JSON_PATHS)
        try:
            check_conditional_headers(request.method, request.headers)
            return await (self._answer_json(request, path) if is_json else self._xml.handle(request))
        except StorageError as error:
            await _drain(request)
            return _error_json(error) if is_json else error_document(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    async def _answer_json(self, request: Request, path: str) -> Response:
        if match := _UPLOAD.fullmatch(path):
            return await self._uploads.handle(request, decode(match[1]))
        match = _DOWNLOAD.fullmatch(path)
        if match and request.method == "GET" and request.query_params.get("alt") == "media":
            return await self._download(request, decode(match[1]), decode(match[2]))
        check_headers(request.headers)
        call = Call.of(request, await request.body())
        if path == "/batch/storage/v1":
            content, content_type = await run_in_threadpool(run_batch, self._json, call)
            return Response(content, headers={"content-type": content_type})
        answer = await run_in_threadpool(self._json.handle, call)
        return Response(status_code=204) if answer is None else JSONResponse(answer)

    async def _download(self, request: Request, bucket: str, name: str) -> Response:
        check_headers(request.headers)
        call = Call.of(request)
        check_parameters(call.query, PRECONDITIONS | {"generation"})
        found, file = await run_in_threadpool(
            self._store.open,
            bucket,
            name,
            generation=call.integer("generation"),
            preconditions=call.preconditions(),
        )
        try:
            check_read_conditions(request.headers, found, etag=found.etag)
            headers = object_headers(found, etag=found.etag)
            return PayloadResponse(file, found, headers, request.headers.get("range"))
        except StorageError:
            file.close()
            raise


def _error_json(error: StorageError) -> Response:
    if error.status == 304:  # has no body; one would be read as the next answer on the connection
        return Response(status_code=304)
    return JSONResponse(error.to_json(), status_code=error.status, headers=dict(error.headers))


async def _drain(request: Request) -> None:
    """Read what is left of the body: a client still sending it would see a reset connection and not the error."""
    with contextlib.suppress(ClientDisconnect, RuntimeError):  # RuntimeError: it was read to its end before
        async for _ in request.stream():
            pass
