"""The stand-in's own small API over plain HTTP on the front port: tokens, what was refused, faults.

POST /token                    OAuth 2.0 JWT bearer grant (RFC 7523), where google-auth clients get access tokens
GET  /penstock/status          served project, refused requests
POST /penstock/faults:signal   {"customJob", "replica", "signal"}: end or stop a replica as a fault would
POST /penstock/faults          {"labels", "faults"}: what is to befall the next job with these labels; see faults.spec
GET  /penstock/faults          {"orders"}: all of them, with what became of each fault
"""

from __future__ import annotations

import json
import signal
import urllib.parse
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock_local.api.errors import ApiError
from penstock_local.faults.board import FaultBoard
from penstock_local.faults.spec import FaultError, parse_order
from penstock_local.frontdoor.auth import (
    TOKEN_LIFETIME_SECONDS,
    AuthenticationError,
    RequireToken,
    TokenVerifier,
)

_TOKEN_PATH = "/token"  # noqa: S105  # a path, not a secret
_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"

SignalReplica = Callable[[str, str, int], None]


def build_control_app(
    verifier: TokenVerifier,
    *,
    status: Callable[[], dict[str, Any]],
    signal_replica: SignalReplica,
    faults: FaultBoard,
) -> ASGIApp:
    """The ASGI app. Every route but the token's wants a token; the token's wants an assertion signed by the key."""

    async def token(request: Request) -> Response:
        form = dict(urllib.parse.parse_qsl((await request.body()).decode()))
        if form.get("grant_type") != _GRANT_TYPE:
            return JSONResponse({"error": "unsupported_grant_type"}, status_code=400)
        try:
            verifier.claims(form.get("assertion", ""))
        except AuthenticationError as exc:
            return JSONResponse({"error": "invalid_grant", "error_description": str(exc)}, status_code=400)
        minted = verifier.mint()
        return JSONResponse(
            {"access_token": minted, "expires_in": TOKEN_LIFETIME_SECONDS, "token_type": "Bearer"}
        )

    async def show_status(_: Request) -> Response:
        return JSONResponse(status())

    async def send_signal(request: Request) -> Response:
        try:
            told = json.loads(await request.body())
            number = signal.Signals[told["signal"]]
            signal_replica(told["customJob"], told["replica"], number)
        except (KeyError, TypeError, ValueError) as exc:
            return _bad_request(
                f"the body must be JSON with customJob, replica and signal (such as SIGKILL): {exc!r}"
            )
        except ApiError as exc:
            return JSONResponse(exc.to_json(), status_code=exc.http_status)
        return JSONResponse({})

    async def show_faults(_: Request) -> Response:
        return JSONResponse({"orders": faults.to_json()})

    async def arm_faults(request: Request) -> Response:
        try:
            faults.arm(parse_order(json.loads(await request.body())))
        except FaultError as exc:
            return _bad_request(str(exc))
        except ValueError as exc:
            return _bad_request(f"the body is not JSON: {exc}")
        return JSONResponse({})

    app = Starlette(
        routes=[
            Route(_TOKEN_PATH, token, methods=["POST"]),
            Route("/penstock/status", show_status),
            Route("/penstock/faults:signal", send_signal, methods=["POST"]),
            Route("/penstock/faults", show_faults),
            Route("/penstock/faults", arm_faults, methods=["POST"]),
        ]
    )
    # What asks for a token has none yet; its assertion proves that it holds the key.
    return RequireToken(app, verifier, host_allowed=_is_this_machine, open_paths=frozenset({_TOKEN_PATH}))


def _bad_request(message: str) -> Response:
    return JSONResponse({"error": {"code": 400, "message": message}}, status_code=400)


def _is_this_machine(host: str) -> bool:
    """A page cannot make a browser send these Host names by rebinding its own."""
    return host in ("127.0.0.1", "localhost")
