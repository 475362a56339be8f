"""REST: URL templates turned into routes, JSON turned into the same messages that gRPC carries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from penstock_local.api.dispatch import CallContext, Dispatcher
from penstock_local.api.errors import ApiError, InvalidArgumentError, NotFoundError
from penstock_local.api.messages import from_json, to_json
from penstock_local.api.methods import Method, Route

_VARIABLE = re.compile(r"\{(?P<name>[\w.]+)(?:=(?P<pattern>[^}]*))?\}")
_SYSTEM_PARAMETERS = {"alt", "$alt", "prettyPrint", "fields", "key", "quotaUser", "$.xgafv", "access_token"}


@dataclass(frozen=True, slots=True)
class _Entry:
    pattern: re.Pattern[str]
    route: Route
    method: Method


def build_rest_app(dispatcher: Dispatcher) -> Starlette:
    """The ASGI app. It does not check tokens: `RequireToken` stands in front of it."""
    entries = list(_entries(dispatcher))

    async def endpoint(request: Request) -> Response:
        integer_enums = "enum-encoding=int" in request.query_params.get("$alt", "")
        try:
            method, message = await _read(entries, request)
            context = CallContext(user_agent=request.headers.get("x-goog-api-client", ""))
            response = await run_in_threadpool(dispatcher.call, method, message, context)
            return JSONResponse(to_json(response, integer_enums=integer_enums))
        except ApiError as exc:
            return JSONResponse(exc.to_json(), status_code=exc.http_status)

    return Starlette(
        routes=[StarletteRoute("/{path:path}", endpoint, methods=["GET", "POST", "PATCH", "DELETE", "PUT"])]
    )


def template_pattern(template: str) -> re.Pattern[str]:
    """A URL template of google.api.http as a regular expression; group names have `.` spelled `__`."""
    pattern, position = "", 0
    for match in _VARIABLE.finditer(template):
        pattern += re.escape(template[position : match.start()])
        segments = re.escape(match["pattern"] or "*").replace(r"\*\*", ".+").replace(r"\*", "[^/:]+")
        pattern += f"(?P<{match['name'].replace('.', '__')}>{segments})"
        position = match.end()
    return re.compile(pattern + re.escape(template[position:]))


def _entries(dispatcher: Dispatcher) -> Iterator[_Entry]:
    for path in dispatcher.implemented:
        method = dispatcher.methods[path]
        for route in method.routes:
            yield _Entry(template_pattern(route.template), route, method)


async def _read(entries: list[_Entry], request: Request) -> tuple[Method, Any]:
    path = request.scope["path"]
    for entry in entries:
        match = entry.pattern.fullmatch(path) if entry.route.http_method == request.method else None
        if match is not None:
            fields = {name.replace("__", "."): value for name, value in match.groupdict().items()}
            body = await request.body()
            return entry.method, _message(entry, fields, body, request)
    raise NotFoundError(
        f"{request.method} {path} is not a method of the services that the stand-in implements."
    )


def _message(entry: _Entry, path_fields: dict[str, str], body: bytes, request: Request) -> Any:
    told: dict[str, Any] = {}
    if entry.route.body and body.strip():
        try:
            parsed = json.loads(body)
        except ValueError as exc:
            raise InvalidArgumentError(f"the body is not JSON: {exc}") from exc
        if not isinstance(parsed, dict):
            raise InvalidArgumentError(f"the body must be a JSON object, not {type(parsed).__name__}.")
        told = parsed if entry.route.body == "*" else {entry.route.body: parsed}
    for name, value in request.query_params.multi_items():
        if name not in _SYSTEM_PARAMETERS:
            _set(told, name, value)
    for name, value in path_fields.items():
        _set(told, name, value)
    return from_json(entry.method.request_type, told)


def _set(told: dict[str, Any], dotted: str, value: str) -> None:
    *parents, leaf = dotted.split(".")
    node = told
    for name in parents:
        node = node.setdefault(name, {})
    node[leaf] = value
