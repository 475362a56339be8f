"""Who may call: every request carries a token that the throw-away key signed.

The stand-in runs commands from posted specs, so a request from a web page must not get through: without the key there
is no token, and a browser's requests are refused by their Origin header besides.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives import serialization
from google.auth import crypt, jwt
from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_LIFETIME_SECONDS = 3600
_REMEMBERED_TOKENS = 1024


class AuthenticationError(Exception):
    """The request has no token, or one that the stand-in's key did not sign, or an expired one."""


class TokenVerifier:
    """Checks and mints tokens with the key of one credentials file. Thread-safe."""

    def __init__(self, credentials_file: Path) -> None:
        account = json.loads(credentials_file.read_text())
        self._email: str = account["client_email"]
        self._signer = crypt.RSASigner.from_service_account_info(account)
        private = serialization.load_pem_private_key(account["private_key"].encode(), password=None)
        self._public_pem = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._verified: dict[str, float] = {}  # an RSA check costs more than most requests that it guards
        self._lock = threading.Lock()

    def verify(self, authorization: str | None) -> None:
        """Raises AuthenticationError unless the value of an Authorization header is a good bearer token."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationError(
                "the request carries no bearer token; `penstock local env` prints how to get one"
            )
        with self._lock:
            if self._verified.get(token, 0.0) > time.time():
                return
        claims = self.claims(token)
        with self._lock:
            if len(self._verified) >= _REMEMBERED_TOKENS:
                self._verified.clear()
            self._verified[token] = float(claims["exp"])

    def claims(self, token: str) -> dict[str, Any]:
        """The claims of a token that this key signed and that is in date. Raises AuthenticationError."""
        try:
            claims: dict[str, Any] = jwt.decode(token, certs=self._public_pem)
        except ValueError as exc:
            raise AuthenticationError(f"the token is not one of this stand-in: {exc}") from exc
        if claims.get("iss") != self._email:
            raise AuthenticationError("the token was issued by somebody else")
        return claims

    def mint(self) -> str:
        """An access token, as the token endpoint hands out for a signed assertion."""
        now = int(time.time())
        payload = {"iss": self._email, "sub": self._email, "iat": now, "exp": now + TOKEN_LIFETIME_SECONDS}
        token: bytes = jwt.encode(self._signer, payload)
        return token.decode()


class RequireToken:
    """ASGI middleware: 401 without a token, 403 for a foreign Host or for any Origin."""

    def __init__(
        self,
        app: ASGIApp,
        verifier: TokenVerifier,
        *,
        host_allowed: Callable[[str], bool],
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._verifier = verifier
        self._host_allowed = host_allowed
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with the reason for the refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").rpartition(":")[0] or headers.get(b"host", "")
        if not self._host_allowed(host):
            await _refuse(send, 403, "PERMISSION_DENIED", f"host {host!r} is not served here")
            return
        if b"origin" in headers:
            await _refuse(send, 403, "PERMISSION_DENIED", "requests from web pages are not served")
            return
        try:
            if scope["path"] not in self._open_paths:
                self._verifier.verify(headers.get(b"authorization"))
        except AuthenticationError as exc:
            await _refuse(send, 401, "UNAUTHENTICATED", str(exc))
            return
        await self._app(scope, receive, send)


class RequireTokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """gRPC interceptor: UNAUTHENTICATED without a token."""

    def __init__(self, verifier: TokenVerifier) -> None:
        self._verifier = verifier

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Hand the call to its handler, or to one that refuses it."""
        metadata = {item.key: item.value for item in details.invocation_metadata}
        try:
            self._verifier.verify(metadata.get("authorization"))
        except AuthenticationError as exc:
            message = str(exc)
            return grpc.unary_unary_rpc_method_handler(
                lambda _request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
            )
        return continuation(details)


async def _refuse(send: Send, code: int, status: str, message: str) -> None:
    body = json.dumps({"error": {"code": code, "message": message, "status": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
