"""ASGI in front of Cloud Storage: requests that a fault strikes are delayed, refused, cut off or answered wrongly."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_local.faults.board import FaultBoard
from penstock_local.faults.spec import StorageFault

CUT = "penstock.cut"
"""Extension of the scope: its `now` cuts the connection at once. The server in front gives it."""

_JSON_OBJECT = re.compile(
    r"(?:/download|/upload|/resumable/upload)?/storage/v1/b/(?P<bucket>[^/]+)(?:/o(?:/(?P<name>[^/]+))?)?"
)
_WRITES = frozenset({"PUT", "POST", "PATCH", "DELETE"})


class FaultyStorage:
    """Hands requests on to Cloud Storage, but for those that a fault on the board strikes."""

    def __init__(self, app: ASGIApp, board: FaultBoard) -> None:
        self._app = app
        self._board = board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        deciding: StorageFault | None = None
        if scope["type"] == "http":
            is_write = scope["method"] in _WRITES
            for fault in self._board.storage_faults(target_of(scope), is_write=is_write):
                if fault.harm == "slow":
                    await asyncio.sleep(fault.delay_seconds)
                elif fault.harm == "wrong-date":
                    send = _dated(send, fault.hours)
                else:
                    deciding = fault
        if deciding is None:
            await self._app(scope, receive, send)
        elif deciding.harm in ("refuse", "read-only"):
            await _refuse(scope, receive, send, deciding)
        elif deciding.harm == "truncate":
            await self._app(scope, receive, _Truncated(send))
        else:
            await self._cut(scope, receive, send)

    async def _cut(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In the middle of the request's body, or of the answer's where the request has none."""
        if scope["method"] in ("PUT", "POST", "PATCH"):
            await receive()  # some of it has arrived
            await _abort(scope)
            return
        await self._app(scope, receive, _CutOff(send, scope))


class _Truncated:
    """An answer whose body is half as long, and says so: only checksums tell."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._left: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in (200, 206):
            headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
            told = [int(value) for name, value in message["headers"] if name == b"content-length"]
            if told:
                self._left = told[0] // 2
                message = {**message, "headers": [*headers, (b"content-length", str(self._left).encode())]}
        elif message["type"] == "http.response.body" and self._left is not None:
            body = message.get("body", b"")[: self._left]
            self._left -= len(body)
            message = {**message, "body": body}
        await self._send(message)


class _CutOff:
    """An answer whose connection is cut when half of its body has gone out."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body = message.get("body", b"")
        await self._send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
        await _abort(self._scope)


async def _abort(scope: Scope) -> None:
    extensions: MutableMapping[str, Any] = scope.get("extensions", {})
    cut: Callable[[], None] = extensions[CUT]["now"]
    cut()
    await asyncio.sleep(0)  # the server notices before it looks for what is missing of the answer


async def _refuse(scope: Scope, receive: Receive, send: Send, fault: StorageFault) -> None:
    while (await receive()).get("more_body", False):
        pass  # a client that still sends would see a lost connection and not the answer
    status = 403 if fault.harm == "read-only" else fault.status
    message = (
        "fault injected: the bucket is read-only" if status == 403 else "fault injected: try again later"
    )
    if _JSON_OBJECT.match(_path(scope)) or _path(scope).startswith("/batch/"):
        kind = b"application/json"
        body = json.dumps({"error": {"code": status, "message": message, "errors": []}}).encode()
    else:
        kind = b"application/xml"
        code = "AccessDenied" if status == 403 else "SlowDown" if status == 429 else "InternalError"
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _dated(send: Send, hours: float) -> Callable[[Message], Awaitable[None]]:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            date = format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True).encode()
            headers = [(name, value) for name, value in message.get("headers", ()) if name != b"date"]
            message = {**message, "headers": [*headers, (b"date", date)]}
        await send(message)

    return answer


class Dated:
    """The Date header of answers that have none yet: the server cannot add it, or a fault could not change it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and b"date" not in dict(message.get("headers", ())):
                date = format_datetime(datetime.now(UTC), usegmt=True).encode()
                message = {**message, "headers": [*message.get("headers", ()), (b"date", date)]}
            await send(message)

        await self._app(scope, receive, answer)


def target_of(scope: Scope) -> str:
    """`bucket/object` that a request is about; of a listing the prefix stands for the object.

    An upload whose name is in its body, and the pieces of a resumable one, have the bucket alone.
    """
    path, query = _path(scope), urllib.parse.parse_qs(scope.get("query_string", b"").decode("latin-1"))
    named = query.get("name") or query.get("prefix") or [""]
    if (match := _JSON_OBJECT.match(path)) is not None:
        name = match["name"] or ""
        return f"{urllib.parse.unquote(match['bucket'])}/{urllib.parse.unquote(name) or named[0]}"
    bucket, _, name = urllib.parse.unquote(path.removeprefix("/")).partition("/")
    return f"{bucket}/{name or named[0]}"


def _path(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")
