"""The XML API, path style (`/bucket/key`): what obstore, and the transfer manager's multipart uploads, speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from penstock_local.storage.blobs import hex_digest
from penstock_local.storage.errors import InvalidRequestError, StorageError, UnsupportedError
from penstock_local.storage.json_api import check_parameters, decode, timestamp
from penstock_local.storage.media import (
    PayloadResponse,
    check_headers,
    check_read_conditions,
    expected_hashes,
    object_headers,
    receive,
    receive_object,
)
from penstock_local.storage.resources import Attributes, Preconditions, StoredObject
from penstock_local.storage.store import ObjectStore, Source
from penstock_local.storage.uploads import MultipartUploads

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_METADATA_PREFIX = "x-goog-meta-"
_ATTRIBUTES = {
    "cache-control": "cache_control",
    "content-disposition": "content_disposition",
    "content-encoding": "content_encoding",
    "content-language": "content_language",
    "content-type": "content_type",
    "x-goog-custom-time": "custom_time",
    "x-goog-storage-class": "storage_class",
}
_CONDITIONS = frozenset({"x-goog-if-generation-match", "x-goog-if-metageneration-match"})
_DESCRIPTION = frozenset({"x-goog-custom-time", "x-goog-storage-class"})
_LISTING = frozenset({"list-type", "prefix", "delimiter", "continuation-token", "start-after", "max-keys"})
_COPY_CONDITION = "x-goog-copy-source-if-generation-match"


class XmlApi:
    """Objects, listings and multipart uploads. Buckets are made and removed over the JSON API."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._uploads = MultipartUploads(store)

    async def handle(self, request: Request) -> Response:
        """Answer one request. Raises StorageError."""
        raw_path: bytes = request.scope["raw_path"]
        bucket, _, key = raw_path.decode("latin-1").removeprefix("/").partition("/")
        if not bucket:
            raise UnsupportedError("Listing buckets over the XML API is not supported; use the JSON API.")
        if not key:
            return await self._bucket(request, decode(bucket))
        return await self._object(request, decode(bucket), decode(key))

    async def _bucket(self, request: Request, bucket: str) -> Response:
        if request.method == "HEAD":
            self._accept(request)
            await run_in_threadpool(self._store.get_bucket, bucket)
            return Response()
        if request.method == "GET" and request.query_params.get("list-type") == "2":
            return await self._list(request, bucket)
        raise UnsupportedError(
            f"{request.method} of a bucket with {dict(request.query_params)} is not supported over the XML API; "
            "GET with list-type=2 and HEAD are."
        )

    async def _object(self, request: Request, bucket: str, name: str) -> Response:
        method, query = request.method, request.query_params
        if method == "POST" and "uploads" in query:
            return await self._begin_multipart(request, bucket, name)
        if "uploadId" in query:
            if method == "PUT":
                return await self._put_part(request, bucket, name)
            if method == "POST":
                return await self._complete_multipart(request, bucket, name)
            if method == "DELETE":
                return await self._abort_multipart(request, bucket, name)
        if method in {"GET", "HEAD"}:
            return await self._get(request, bucket, name)
        if method == "PUT" and "x-goog-copy-source" in request.headers:
            return await self._copy(request, bucket, name)
        if method == "PUT":
            return await self._put(request, bucket, name)
        if method == "DELETE":
            return await self._delete(request, bucket, name)
        raise UnsupportedError(f"{method} of an object with {dict(query)} is not supported over the XML API.")

    async def _get(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(request, _CONDITIONS, frozenset({"generation"}))
        found, file = await run_in_threadpool(
            self._store.open,
            bucket,
            name,
            generation=_integer("generation", request.query_params.get("generation")),
            preconditions=_preconditions(request.headers),
        )
        try:
            etag = _etag(found)
            check_read_conditions(request.headers, found, etag=etag)
            return PayloadResponse(
                file, found, object_headers(found, etag=etag), request.headers.get("range")
            )
        except StorageError:
            file.close()
            raise

    async def _put(self, request: Request, bucket: str, name: str) -> Response:
        headers = request.headers
        self._accept(request, _CONDITIONS | _DESCRIPTION | {"x-goog-hash"})
        attributes, preconditions, expected = (
            _attributes(headers),
            _preconditions(headers),
            expected_hashes(headers),
        )
        written = await receive_object(
            self._store,
            request.stream(),
            bucket,
            name,
            attributes=attributes,
            preconditions=preconditions,
            expected=expected,
        )
        return Response(headers=_written_headers(written))

    async def _copy(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(
            request, _CONDITIONS | {"x-goog-copy-source", "x-goog-metadata-directive", _COPY_CONDITION}
        )
        if request.headers.get("x-goog-metadata-directive", "COPY") != "COPY":
            raise UnsupportedError(
                "x-goog-metadata-directive: REPLACE is not supported; rewrite over the JSON API."
            )
        origin = request.headers["x-goog-copy-source"].removeprefix("/")
        source_bucket, _, source_name = decode(origin).partition("/")
        wanted = _integer(_COPY_CONDITION, request.headers.get(_COPY_CONDITION))
        source = Source(name=source_name, preconditions=Preconditions(if_generation_match=wanted))
        written = await run_in_threadpool(
            self._store.copy,
            source_bucket,
            source,
            bucket,
            name,
            preconditions=_preconditions(request.headers),
        )
        fields = {"ETag": _etag(written), "LastModified": timestamp(written.updated)}
        return _xml("CopyObjectResult", fields, _written_headers(written))

    async def _delete(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(request, _CONDITIONS, frozenset({"generation"}))
        generation = _integer("generation", request.query_params.get("generation"))
        preconditions = _preconditions(request.headers)
        await run_in_threadpool(
            self._store.delete, bucket, name, generation=generation, preconditions=preconditions
        )
        return Response(status_code=204)

    async def _list(self, request: Request, bucket: str) -> Response:
        query = request.query_params
        self._accept(request, frozenset(), _LISTING)
        after = query.get("start-after")
        limit = _integer("max-keys", query.get("max-keys"))
        page = await run_in_threadpool(
            self._store.list,
            bucket,
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            page_token=query.get("continuation-token", ""),
            max_results=1000 if limit is None else limit,
            start_offset=after + "\0" if after else "",
        )
        fields: list[tuple[str, Any]] = [
            ("Name", bucket),
            ("Prefix", query.get("prefix", "")),
            ("KeyCount", len(page.objects) + len(page.prefixes)),
            ("IsTruncated", "true" if page.next_page_token else "false"),
        ]
        if page.next_page_token:
            fields.append(("NextContinuationToken", page.next_page_token))
        fields += [("Contents", _content(found)) for found in page.objects]
        fields += [("CommonPrefixes", {"Prefix": prefix}) for prefix in page.prefixes]
        return _xml("ListBucketResult", fields)

    async def _begin_multipart(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(request, _DESCRIPTION, frozenset({"uploads"}))
        upload_id = await run_in_threadpool(self._uploads.begin, bucket, name, _attributes(request.headers))
        return _xml("InitiateMultipartUploadResult", {"Bucket": bucket, "Key": name, "UploadId": upload_id})

    async def _put_part(self, request: Request, bucket: str, name: str) -> Response:
        # The transfer manager repeats the headers of the first request with every part.
        self._accept(request, _DESCRIPTION | {"x-goog-hash"}, frozenset({"partNumber", "uploadId"}))
        number = _integer("partNumber", request.query_params.get("partNumber")) or 0
        expected = expected_hashes(request.headers)
        part = await run_in_threadpool(self._store.stage)
        try:
            await receive(request.stream(), part.write)
            part.check(expected)
            upload_id = request.query_params["uploadId"]
            await run_in_threadpool(self._uploads.put_part, upload_id, bucket, name, number, part)
        except BaseException:
            part.discard()
            raise
        hashes = f"crc32c={part.crc32c},md5={part.md5}"
        return Response(headers={"etag": f'"{hex_digest(part.md5)}"', "x-goog-hash": hashes})

    async def _complete_multipart(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(request, _DESCRIPTION | {"x-goog-hash"}, frozenset({"uploadId"}))
        parts = _parse_parts(await request.body())
        written = await run_in_threadpool(
            self._uploads.complete,
            request.query_params["uploadId"],
            bucket,
            name,
            parts,
            expected_hashes(request.headers),
        )
        fields = {
            "Location": str(request.url.replace(query="")),
            "Bucket": bucket,
            "Key": name,
            "ETag": _etag(written),
        }
        return _xml("CompleteMultipartUploadResult", fields, _written_headers(written))

    async def _abort_multipart(self, request: Request, bucket: str, name: str) -> Response:
        self._accept(request, _DESCRIPTION, frozenset({"uploadId"}))
        await run_in_threadpool(self._uploads.abort, request.query_params["uploadId"], bucket, name)
        return Response(status_code=204)

    def _accept(
        self,
        request: Request,
        headers: frozenset[str] = frozenset(),
        parameters: frozenset[str] = frozenset(),
    ) -> None:
        """Raises UnsupportedError for a header or parameter that would be ignored."""
        meta = frozenset(name for name in request.headers if name.startswith(_METADATA_PREFIX))
        check_headers(request.headers, headers | meta)
        check_parameters(request.query_params, parameters)


def error_document(error: StorageError) -> Response:
    """The error document."""
    if error.status == 304:
        return Response(status_code=304)
    fields = {"Code": error.xml_code, "Message": str(error), "Details": str(error)}
    return _xml("Error", fields, error.headers, status_code=error.status, namespace="")


def _xml(
    root: str,
    fields: Any,
    headers: Mapping[str, str] | None = None,
    *,
    status_code: int = 200,
    namespace: str = _NAMESPACE,
) -> Response:
    attribute = f" xmlns='{namespace}'" if namespace else ""
    document = f"<?xml version='1.0' encoding='UTF-8'?><{root}{attribute}>{_elements(fields)}</{root}>"
    return Response(
        document, status_code=status_code, headers=dict(headers or {}), media_type="application/xml"
    )


def _elements(value: Any) -> str:
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list):
        return "".join(f"<{name}>{_elements(inner)}</{name}>" for name, inner in value)
    return escape(str(value))


def _content(found: StoredObject) -> dict[str, Any]:
    return {
        "Key": found.name,
        "Generation": found.generation,
        "MetaGeneration": found.metageneration,
        "LastModified": timestamp(found.updated),
        "ETag": _etag(found),
        "Size": found.size,
        "StorageClass": found.attributes.storage_class,
    }


def _parse_parts(body: bytes) -> list[tuple[int, str]]:
    try:
        root = ElementTree.fromstring(body)  # noqa: S314  # expat resolves no external entities and bounds expansion
        return [
            (int(part.findtext("{*}PartNumber", "")), part.findtext("{*}ETag", ""))
            for part in root.findall("{*}Part")
        ]
    except (ElementTree.ParseError, ValueError) as exc:
        raise InvalidRequestError(f"the body is not a CompleteMultipartUpload document: {exc}") from exc


def _attributes(headers: Mapping[str, str]) -> Attributes:
    given: dict[str, Any] = {
        ours: headers[theirs] for theirs, ours in _ATTRIBUTES.items() if theirs in headers
    }
    prefix = _METADATA_PREFIX
    metadata = {
        name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)
    }
    return Attributes(**given, metadata=metadata)


def _preconditions(headers: Mapping[str, str]) -> Preconditions:
    generation, metageneration = "x-goog-if-generation-match", "x-goog-if-metageneration-match"
    return Preconditions(
        if_generation_match=_integer(generation, headers.get(generation)),
        if_metageneration_match=_integer(metageneration, headers.get(metageneration)),
    )


def _written_headers(written: StoredObject) -> dict[str, str]:
    headers = object_headers(written, etag=_etag(written))
    return {name: value for name, value in headers.items() if name == "etag" or name.startswith("x-goog-")}


def _etag(found: StoredObject) -> str:
    """As on the XML API: the hexadecimal MD5, or the JSON API's ETag where there is none."""
    return f'"{hex_digest(found.md5)}"' if found.md5 else f'"-{found.etag}"'


def _integer(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdecimal():
        raise InvalidRequestError(f"{name}: {value!r} is not a whole number.")
    return int(value)
