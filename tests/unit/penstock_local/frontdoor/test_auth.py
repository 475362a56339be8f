from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.auth import crypt, jwt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock_local.frontdoor.auth import AuthenticationError, RequireToken, TokenVerifier
from penstock_local.frontdoor.certificates import make_identity


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Credentials of two stand-ins."""
    directory = tmp_path_factory.mktemp("identities")
    return [
        make_identity(directory / name, project_id="demo", token_uri="x").credentials_file
        for name in ("ours", "theirs")
    ]


@pytest.fixture
def verifier(files: list[Path]) -> TokenVerifier:
    return TokenVerifier(files[0])


def signed(file: Path, **claims: Any) -> str:
    """What google-auth's own clients send: a JWT signed with the service account's key."""
    account = json.loads(file.read_text())
    now = int(time.time())
    payload = {"iss": account["client_email"], "iat": now, "exp": now + 60, **claims}
    token: bytes = jwt.encode(crypt.RSASigner.from_service_account_info(account), payload)
    return token.decode()


def test_a_minted_token_and_a_self_signed_one_are_good_more_than_once(
    verifier: TokenVerifier, files: list[Path]
) -> None:
    for token in (verifier.mint(), signed(files[0], aud="https://aiplatform.googleapis.com/")):
        verifier.verify(f"Bearer {token}")
        verifier.verify(f"bearer {token}")


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        ({"iat": 1, "exp": 2}, "expired"),
        ({"iat": 4_000_000_000, "exp": 4_000_000_060}, "not one of this stand-in"),
        ({"iss": "somebody@else"}, "issued by somebody else"),
    ],
)
def test_a_token_out_of_date_or_of_another_issuer_is_refused(
    verifier: TokenVerifier, files: list[Path], claims: dict[str, Any], told: str
) -> None:
    with pytest.raises(AuthenticationError, match=told):
        verifier.verify(f"Bearer {signed(files[0], **claims)}")


def test_a_token_is_not_remembered_beyond_its_time(verifier: TokenVerifier, files: list[Path]) -> None:
    end = int(time.time()) + 1
    token = signed(files[0], exp=end)
    verifier.verify(f"Bearer {token}")
    time.sleep(end + 1.05 - time.time())  # the claim counts whole seconds
    with pytest.raises(AuthenticationError, match="expired"):
        verifier.verify(f"Bearer {token}")


def test_a_token_signed_by_another_stand_ins_key_is_refused(
    verifier: TokenVerifier, files: list[Path]
) -> None:
    with pytest.raises(AuthenticationError, match="not one of this stand-in"):
        verifier.verify(f"Bearer {signed(files[1])}")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer a.b.c", "Bearer \u00e9"]
)
def test_what_is_no_token_is_refused(verifier: TokenVerifier, header: str | None) -> None:
    with pytest.raises(AuthenticationError):
        verifier.verify(header)


def client(verifier: TokenVerifier, **given: Any) -> TestClient:
    async def hello(_: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/{path:path}", hello)])
    guarded: Callable[..., Awaitable[None]] = RequireToken(
        app, verifier, host_allowed=lambda host: host == "storage.googleapis.com", **given
    )
    return TestClient(guarded, base_url="http://storage.googleapis.com")


@pytest.mark.parametrize(
    ("headers", "code", "status"),
    [
        ({}, 200, ""),
        ({"Host": "storage.googleapis.com:443"}, 200, ""),
        ({"Authorization": ""}, 401, "UNAUTHENTICATED"),
        ({"Origin": "null"}, 403, "PERMISSION_DENIED"),
        ({"Origin": "https://storage.googleapis.com"}, 403, "PERMISSION_DENIED"),
        ({"Host": "evil.example"}, 403, "PERMISSION_DENIED"),
        ({"Host": "evil.example:443"}, 403, "PERMISSION_DENIED"),
    ],
)
def test_only_a_request_with_a_token_to_a_served_host_and_not_of_a_page_gets_through(
    verifier: TokenVerifier, headers: dict[str, str], code: int, status: str
) -> None:
    answer = client(verifier).get("/x", headers={"Authorization": f"Bearer {verifier.mint()}", **headers})
    assert answer.status_code == code
    assert not status or answer.json()["error"]["status"] == status


def test_an_open_path_needs_no_token_but_the_right_host(verifier: TokenVerifier) -> None:
    guarded = client(verifier, open_paths=frozenset({"/token"}))
    assert guarded.get("/token").status_code == 200
    assert guarded.get("/tokens").status_code == 401
    assert guarded.get("/token", headers={"Host": "evil.example"}).status_code == 403
