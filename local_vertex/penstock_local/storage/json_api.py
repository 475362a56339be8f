"""The JSON API's methods on metadata: everything that carries no payload.

A method is a plain function from a `Call` to a JSON value. It may block, so the wire runs it in the thread pool; a batch
runs several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote, urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request

from penstock_local.storage.blobs import ExpectedHashes
from penstock_local.storage.errors import InvalidRequestError, UnsupportedError
from penstock_local.storage.media import check_read_conditions
from penstock_local.storage.resources import Attributes, Bucket, Preconditions, StoredObject
from penstock_local.storage.store import ObjectStore, Source

HARMLESS = frozenset(
    {"alt", "fields", "key", "prettyPrint", "projection", "quotaUser", "userProject", "$.xgafv", "project"}
)
"""Parameters that change no meaning here: there is one project, one user, and answers are always whole."""

_OFF_IS_FINE = frozenset(
    {
        "enableObjectRetention",
        "includeFoldersAsPrefixes",
        "overrideUnlockedRetention",
        "returnPartialSuccess",
        "softDeleted",
    }
)
PRECONDITIONS = frozenset(
    {"ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch"}
)
_METAGENERATION = frozenset({"ifMetagenerationMatch", "ifMetagenerationNotMatch"})
_SOURCE_PRECONDITIONS = frozenset(name.replace("if", "ifSource", 1) for name in PRECONDITIONS)
_LISTING = {
    "prefix": "prefix",
    "delimiter": "delimiter",
    "pageToken": "page_token",
    "maxResults": "max_results",
    "startOffset": "start_offset",
    "endOffset": "end_offset",
    "matchGlob": "match_glob",
    "includeTrailingDelimiter": "include_trailing_delimiter",
}

_ATTRIBUTES = {
    "cacheControl": "cache_control",
    "contentDisposition": "content_disposition",
    "contentEncoding": "content_encoding",
    "contentLanguage": "content_language",
    "contentType": "content_type",
    "customTime": "custom_time",
    "metadata": "metadata",
    "storageClass": "storage_class",
}
_OBJECT_OUTPUT = frozenset(
    {
        "bucket", "componentCount", "crc32c", "etag", "generation", "id", "kind", "md5Hash", "mediaLink",
        "metageneration", "name", "selfLink", "size", "timeCreated", "timeFinalized", "timeStorageClassUpdated",
        "updated",
    }
)  # fmt: skip
_BUCKET_OUTPUT = frozenset(
    {
        "etag", "generation", "iamConfiguration", "id", "kind", "location", "locationType", "metageneration", "name",
        "projectNumber", "selfLink", "timeCreated", "updated",
    }
)  # fmt: skip
_IAM_CONFIGURATION = {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the JSON API, from the network or from a batch."""

    method: str
    path: str
    """Percent-encoded, as sent."""
    query: QueryParams
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    base_url: str
    """Scheme and host that the client used; links in answers start with it."""

    @classmethod
    def of(cls, request: Request, body: bytes = b"") -> Call:
        """A call from the network; without a body when that is a payload."""
        path = request.scope["raw_path"].decode("latin-1")
        base_url = f"{request.url.scheme}://{request.url.netloc}"
        return cls(request.method, path, query_of(request.url.query), request.headers, body, base_url)

    def json(self) -> dict[str, Any]:
        """The body; an empty one is an empty object. Raises InvalidRequestError."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as exc:
            raise InvalidRequestError(f"Parse Error: the body is not JSON: {exc}") from exc
        if not isinstance(value, dict):
            raise InvalidRequestError("Parse Error: the body must be a JSON object.")
        return value

    def integer(self, name: str) -> int | None:
        """A parameter as a number. Raises InvalidRequestError."""
        return _integer(name, self.query.get(name))

    def preconditions(self, prefix: str = "if") -> Preconditions:
        """The conditions among the parameters; `ifSource` for those on the source of a copy."""
        return Preconditions(
            if_generation_match=self.integer(f"{prefix}GenerationMatch"),
            if_generation_not_match=self.integer(f"{prefix}GenerationNotMatch"),
            if_metageneration_match=self.integer(f"{prefix}MetagenerationMatch"),
            if_metageneration_not_match=self.integer(f"{prefix}MetagenerationNotMatch"),
        )


Handler = Callable[..., dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    pattern: re.Pattern[str]
    handler: Handler
    parameters: frozenset[str]


class JsonApi:
    """Methods by HTTP method and path. Thread-safe."""

    def __init__(self, store: ObjectStore, *, project_number: int) -> None:
        self._store = store
        self._project_number = project_number
        of_object = PRECONDITIONS | {"generation"}
        of_copy = PRECONDITIONS | _SOURCE_PRECONDITIONS | {"sourceGeneration"}
        self._routes = [
            _route("GET", "/b", self._list_buckets, {"prefix", "maxResults"}),
            _route("POST", "/b", self._create_bucket),
            _route("GET", "/b/{bucket}", self._get_bucket, _METAGENERATION),
            _route("PATCH", "/b/{bucket}", self._patch_bucket, _METAGENERATION),
            _route("PUT", "/b/{bucket}", self._patch_bucket, _METAGENERATION),
            _route("DELETE", "/b/{bucket}", self._delete_bucket, _METAGENERATION),
            _route("GET", "/b/{bucket}/storageLayout", self._storage_layout, {"prefix"}),
            _route("GET", "/b/{bucket}/iam", self._get_iam_policy, {"optionsRequestedPolicyVersion"}),
            _route("PUT", "/b/{bucket}/iam", self._set_iam_policy),
            _route("GET", "/b/{bucket}/iam/testPermissions", self._test_permissions, {"permissions"}),
            # Without versioning the live objects are all versions there are.
            _route("GET", "/b/{bucket}/o", self._list_objects, _LISTING.keys() | {"versions"}),
            _route("GET", "/b/{bucket}/o/{name}", self._get_object, of_object),
            _route("PATCH", "/b/{bucket}/o/{name}", self._patch_object, of_object),
            _route("PUT", "/b/{bucket}/o/{name}", self._replace_object, of_object),
            _route("DELETE", "/b/{bucket}/o/{name}", self._delete_object, of_object),
            _route("POST", "/b/{bucket}/o/{name}/compose", self._compose, PRECONDITIONS),
            _route("POST", "/b/{source_bucket}/o/{source}/copyTo/b/{bucket}/o/{name}", self._copy, of_copy),
            _route(
                "POST",
                "/b/{source_bucket}/o/{source}/rewriteTo/b/{bucket}/o/{name}",
                self._rewrite,
                of_copy | {"rewriteToken", "maxBytesRewrittenPerCall"},
            ),
        ]

    def handle(self, call: Call) -> dict[str, Any] | None:
        """The answer; None is an answer without a body. Raises StorageError."""
        path = call.path.removeprefix("/storage/v1")
        for route in self._routes:
            match = route.pattern.fullmatch(path)
            if match and route.method == call.method:
                check_parameters(call.query, route.parameters)
                return route.handler(call, **{key: decode(value) for key, value in match.groupdict().items()})
        raise UnsupportedError(f"{call.method} {call.path} is not a method that the stand-in implements.")

    # Buckets.

    def _list_buckets(self, call: Call) -> dict[str, Any]:
        buckets = self._store.list_buckets(prefix=call.query.get("prefix", ""))
        limit = call.integer("maxResults")
        if limit is not None and len(buckets) > limit:
            raise UnsupportedError(
                f"maxResults={limit} is less than the {len(buckets)} buckets; pages are not made."
            )
        return {"kind": "storage#buckets", "items": [self._bucket_json(call, bucket) for bucket in buckets]}

    def _create_bucket(self, call: Call) -> dict[str, Any]:
        body = call.json()
        labels, storage_class = _bucket_changes(body)
        bucket = self._store.create_bucket(
            _string(body, "name"),
            body.get("location") or "US",
            labels=_merge({}, labels),
            storage_class=storage_class or "STANDARD",
        )
        return self._bucket_json(call, bucket)

    def _get_bucket(self, call: Call, bucket: str) -> dict[str, Any]:
        return self._bucket_json(call, self._store.get_bucket(bucket, preconditions=call.preconditions()))

    def _patch_bucket(self, call: Call, bucket: str) -> dict[str, Any]:
        labels, storage_class = _bucket_changes(call.json())

        def change(before: Bucket) -> Bucket:
            kept = {} if call.method == "PUT" else before.labels
            return replace(
                before, labels=_merge(kept, labels), storage_class=storage_class or before.storage_class
            )

        return self._bucket_json(
            call, self._store.update_bucket(bucket, change, preconditions=call.preconditions())
        )

    def _delete_bucket(self, call: Call, bucket: str) -> None:
        self._store.delete_bucket(bucket, preconditions=call.preconditions())

    def _storage_layout(self, _call: Call, bucket: str) -> dict[str, Any]:
        found = self._store.get_bucket(bucket)
        return {
            "kind": "storage#storageLayout",
            "bucket": found.name,
            "location": found.location,
            "locationType": _location_type(found),
            "hierarchicalNamespace": {"enabled": False},
        }

    def _get_iam_policy(self, _call: Call, bucket: str) -> dict[str, Any]:
        kept = self._store.iam_policy(bucket)
        head = {
            "kind": "storage#policy",
            "resourceId": f"projects/_/buckets/{bucket}",
            "version": 1,
            "etag": "CAE=",
        }
        return {**head, "bindings": [], **kept}

    def _set_iam_policy(self, call: Call, bucket: str) -> dict[str, Any]:
        body = call.json()
        self._store.set_iam_policy(bucket, {key: body[key] for key in ("version", "bindings") if key in body})
        return self._get_iam_policy(call, bucket)

    def _test_permissions(self, call: Call, bucket: str) -> dict[str, Any]:
        self._store.get_bucket(bucket)
        asked = call.query.getlist("permissions")
        return {"kind": "storage#testIamPermissionsResponse", "permissions": asked}

    def _bucket_json(self, call: Call, bucket: Bucket) -> dict[str, Any]:
        return {
            "kind": "storage#bucket",
            "id": bucket.name,
            "name": bucket.name,
            "selfLink": f"{call.base_url}/storage/v1/b/{bucket.name}",
            "projectNumber": str(self._project_number),
            "generation": str(bucket.generation),
            "metageneration": str(bucket.metageneration),
            "location": bucket.location,
            "locationType": _location_type(bucket),
            "storageClass": bucket.storage_class,
            "etag": bucket.etag,
            "timeCreated": timestamp(bucket.time_created),
            "updated": timestamp(bucket.updated),
            "iamConfiguration": _IAM_CONFIGURATION,
            **({"labels": dict(bucket.labels)} if bucket.labels else {}),
        }

    # Objects.

    def _list_objects(self, call: Call, bucket: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            ours: call.query[theirs] for theirs, ours in _LISTING.items() if theirs in call.query
        }
        if "max_results" in arguments:
            arguments["max_results"] = call.integer("maxResults")
        if "include_trailing_delimiter" in arguments:
            arguments["include_trailing_delimiter"] = (
                arguments["include_trailing_delimiter"].lower() == "true"
            )
        page = self._store.list(bucket, **arguments)
        return {
            "kind": "storage#objects",
            **({"nextPageToken": page.next_page_token} if page.next_page_token else {}),
            **({"prefixes": list(page.prefixes)} if page.prefixes else {}),
            "items": [object_json(found, call.base_url) for found in page.objects],
        }

    def _get_object(self, call: Call, bucket: str, name: str) -> dict[str, Any]:
        found = self._store.get(
            bucket, name, generation=call.integer("generation"), preconditions=call.preconditions()
        )
        check_read_conditions({**call.headers, "accept-encoding": "gzip"}, found, etag=found.etag)
        return object_json(found, call.base_url)

    def _patch_object(self, call: Call, bucket: str, name: str) -> dict[str, Any]:
        body = call.json()
        changes = _read_attributes(body)

        def change(before: Attributes) -> Attributes:
            merged = dict(changes)
            if body.get("metadata"):  # null clears it
                merged["metadata"] = _merge(before.metadata, body["metadata"])
            return replace(before, **merged)

        return self._update(call, bucket, name, change)

    def _replace_object(self, call: Call, bucket: str, name: str) -> dict[str, Any]:
        attributes = attributes_of(call.json())
        return self._update(call, bucket, name, lambda _before: attributes)

    def _update(
        self, call: Call, bucket: str, name: str, change: Callable[[Attributes], Attributes]
    ) -> dict[str, Any]:
        found = self._store.update(
            bucket, name, change, generation=call.integer("generation"), preconditions=call.preconditions()
        )
        return object_json(found, call.base_url)

    def _delete_object(self, call: Call, bucket: str, name: str) -> None:
        self._store.delete(
            bucket, name, generation=call.integer("generation"), preconditions=call.preconditions()
        )

    def _compose(self, call: Call, bucket: str, name: str) -> dict[str, Any]:
        body = call.json()
        refuse_unknown(body, {"kind", "sourceObjects", "destination"}, where="")
        attributes = attributes_of(body.get("destination") or {}, where="destination.")
        sources = [
            _component(item, f"sourceObjects[{position}]")
            for position, item in enumerate(body.get("sourceObjects") or [])
        ]
        composed = self._store.compose(
            bucket, sources, name, attributes=attributes, preconditions=call.preconditions()
        )
        return object_json(composed, call.base_url)

    def _copy(self, call: Call, source_bucket: str, source: str, bucket: str, name: str) -> dict[str, Any]:
        return object_json(self._copied(call, source_bucket, source, bucket, name), call.base_url)

    def _rewrite(self, call: Call, source_bucket: str, source: str, bucket: str, name: str) -> dict[str, Any]:
        if "rewriteToken" in call.query:
            raise InvalidRequestError(
                "rewriteToken: every rewrite is done in one call, which returns no token."
            )
        found = self._copied(call, source_bucket, source, bucket, name)
        size = str(found.size)
        return {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": size,
            "objectSize": size,
            "done": True,
            "resource": object_json(found, call.base_url),
        }

    def _copied(self, call: Call, source_bucket: str, source: str, bucket: str, name: str) -> StoredObject:
        body = call.json()
        given = attributes_of(body)
        # A storage class alone, or nothing, keeps the attributes of the source; anything else replaces all of them.
        attributes = given if body.keys() & (_ATTRIBUTES.keys() - {"storageClass"}) else None
        origin = Source(
            name=source,
            generation=call.integer("sourceGeneration"),
            preconditions=call.preconditions("ifSource"),
        )
        return self._store.copy(
            source_bucket, origin, bucket, name, attributes=attributes, preconditions=call.preconditions()
        )


def check_parameters(query: Mapping[str, str], known: frozenset[str]) -> None:
    """Raises UnsupportedError for a parameter that would be ignored."""
    for name, value in query.items():
        off = name in _OFF_IS_FINE and value.lower() == "false"
        if name not in known and name not in HARMLESS and not off:
            raise UnsupportedError(f"The query parameter {name}={value} is not supported by the stand-in.")


def refuse_unknown(body: Mapping[str, Any], known: frozenset[str] | set[str], *, where: str) -> None:
    """Raises UnsupportedError for a field that would be ignored; one that says nothing is let through."""
    for name, value in body.items():
        if name not in known and value not in (None, False, [], {}):
            raise UnsupportedError(f"The field {where}{name} is not supported by the stand-in.")


def attributes_of(body: Mapping[str, Any], *, where: str = "") -> Attributes:
    """The attributes in an object resource. Raises InvalidRequestError, and UnsupportedError for any other input."""
    return Attributes(**_read_attributes(body, where=where))


def read_hashes(body: Mapping[str, Any]) -> ExpectedHashes:
    """What an object resource that comes with a payload says about the payload."""
    expected: list[Any] = [("crc32c", body.get("crc32c")), ("md5", body.get("md5Hash"))]
    return tuple((algorithm, digest) for algorithm, digest in expected if digest)


def object_json(found: StoredObject, base_url: str) -> dict[str, Any]:
    """The object resource."""
    path = f"/storage/v1/b/{found.bucket}/o/{quote(found.name, safe='')}"
    query = urlencode({"generation": found.generation, "alt": "media"})
    created = timestamp(found.time_created)
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{found.bucket}/{found.name}/{found.generation}",
        "selfLink": f"{base_url}{path}",
        "mediaLink": f"{base_url}/download{path}?{query}",
        "name": found.name,
        "bucket": found.bucket,
        "generation": str(found.generation),
        "metageneration": str(found.metageneration),
        "size": str(found.size),
        "md5Hash": found.md5,
        "crc32c": found.crc32c,
        "componentCount": found.component_count,
        "etag": found.etag,
        "timeCreated": created,
        "updated": timestamp(found.updated),
        "timeStorageClassUpdated": created,
        "timeFinalized": created,
    }
    resource |= {theirs: getattr(found.attributes, ours) for theirs, ours in _ATTRIBUTES.items()}
    resource["metadata"] = dict(found.metadata) or None
    return {key: value for key, value in resource.items() if value is not None}


def timestamp(time: datetime) -> str:
    """RFC 3339 in UTC with milliseconds, as the API shows it."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def decode(segment: str) -> str:
    """A percent-encoded piece of a path. Raises InvalidRequestError unless it is UTF-8."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(f"{segment!r} is not percent-encoded UTF-8.") from exc


def query_of(text: str) -> QueryParams:
    """The parameters of a URL."""
    # google-cloud-storage misspells this one when it uploads.
    return QueryParams(text.replace("ifMetaGenerationNotMatch", "ifMetagenerationNotMatch"))


def _route(
    method: str, template: str, handler: Handler, parameters: frozenset[str] | set[str] = frozenset()
) -> _Route:
    pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", template))
    return _Route(method, pattern, handler, frozenset(parameters))


def _read_attributes(body: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """The attributes given, by the names of `Attributes`; a null becomes the default."""
    refuse_unknown(body, _OBJECT_OUTPUT | _ATTRIBUTES.keys(), where=where)
    defaults = Attributes()
    given: dict[str, Any] = {}
    for theirs, ours in _ATTRIBUTES.items():
        value = body.get(theirs)
        if value is None and theirs in body:
            given[ours] = getattr(defaults, ours)
        elif ours == "metadata" and value is not None:
            given[ours] = _string_map(value, f"{where}metadata")
        elif value is not None:
            given[ours] = _string(body, theirs)
    return given


def _bucket_changes(body: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Labels, where null removes one, and the storage class, None when not given."""
    refuse_unknown(body, _BUCKET_OUTPUT | {"labels", "storageClass"}, where="")
    access = (body.get("iamConfiguration") or {}).get("uniformBucketLevelAccess") or {}
    if access.get("enabled") is False:
        raise UnsupportedError(
            "iamConfiguration.uniformBucketLevelAccess.enabled=false is not supported: there are no object ACLs here."
        )
    return body.get("labels") or {}, body.get("storageClass")


def _component(item: Mapping[str, Any], where: str) -> Source:
    refuse_unknown(item, {"name", "generation", "objectPreconditions"}, where=f"{where}.")
    conditions = item.get("objectPreconditions") or {}
    refuse_unknown(conditions, {"ifGenerationMatch"}, where=f"{where}.objectPreconditions.")
    wanted = _integer(f"{where}.objectPreconditions.ifGenerationMatch", conditions.get("ifGenerationMatch"))
    return Source(
        name=_string(item, "name"),
        generation=_integer(f"{where}.generation", item.get("generation")),
        preconditions=Preconditions(if_generation_match=wanted),
    )


def _merge(before: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """JSON merge patch: null removes a key."""
    return _string_map({**before, **changes}, "a map")


def _string_map(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str | None) for item in value.values()):
        raise InvalidRequestError(f"{where} must map strings to strings; given was {value!r}.")
    return {key: item for key, item in value.items() if item is not None}


def _location_type(bucket: Bucket) -> str:
    return "region" if "-" in bucket.location else "multi-region"


def _integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"Invalid value for {name}: {value!r} is not a whole number.") from exc


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"Required field {name!r} is missing or not a string.")
    return value
