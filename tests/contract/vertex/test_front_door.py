"""Who gets in, and what does not get out."""

from __future__ import annotations

import socket

import pytest
import requests

from contract.vertex.stand_in import BUCKET, Rest, StandIn

JOBS = "https://us-central1-aiplatform.googleapis.com/v1/projects/demo/locations/us-central1/customJobs"


@pytest.fixture
def stranger(rest: Rest) -> requests.Session:
    """A client that trusts the CA and uses the proxy, but has no token."""
    session = requests.Session()
    session.trust_env = False
    session.proxies, session.verify = rest.session.proxies, rest.session.verify
    return session


@pytest.mark.parametrize(
    "url",
    [
        JOBS,
        f"https://storage.googleapis.com/storage/v1/b/{BUCKET}",
        "https://logging.googleapis.com/v2/entries:list",
    ],
)
def test_without_a_token_no_api_answers(stranger: requests.Session, url: str) -> None:
    with stranger:
        for headers in ({}, {"Authorization": "Bearer made-up"}, {"Authorization": "Basic YTpi"}):
            response = stranger.get(url, headers=headers)
            assert (response.status_code, response.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


def test_without_a_token_the_control_api_does_not_answer(vertex: StandIn, stranger: requests.Session) -> None:
    control = f"http://127.0.0.1:{vertex.port}"
    with stranger:
        stranger.proxies = {}
        assert stranger.get(f"{control}/penstock/status").status_code == 401
        assert stranger.post(f"{control}/penstock/faults:signal", json={}).status_code == 401
        grant = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": "made.up.one"}
        refused = stranger.post(f"{control}/token", data=grant)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid_grant")


def test_a_web_page_is_refused_even_with_a_token(vertex: StandIn, rest: Rest) -> None:
    page = {"Origin": "https://evil.example"}
    assert rest.session.get(JOBS, headers=page).status_code == 403
    status = f"http://127.0.0.1:{vertex.port}/penstock/status"
    assert rest.session.get(status, headers=page).status_code == 403
    # A name that was rebound to 127.0.0.1 arrives with the page's own Host.
    assert rest.session.get(status, headers={"Host": "evil.example"}).status_code == 403


def test_other_hosts_are_refused_and_listed(rest: Rest) -> None:
    for url in ("https://example.com/", "https://bigquery.googleapis.com/"):
        with pytest.raises(requests.exceptions.ProxyError, match="403"):
            rest.session.get(url)
    with requests.Session() as plain:
        plain.trust_env = False
        plain.proxies = {"http": rest.session.proxies["https"]}
        assert plain.get("http://example.com/secret").status_code == 403
    refused = rest.control("GET", "status")["refused"]
    assert refused[-3:] == ["example.com:443", "bigquery.googleapis.com:443", "http://example.com/secret"]
    assert "storage.googleapis.com:443" not in refused


@pytest.mark.parametrize(
    "head", [b"\r\n\r\n", b"CONNECT\r\n\r\n", b"CONNECT storage.googleapis.com:80 HTTP/1.1\r\n\r\n"]
)
def test_a_request_that_makes_no_sense_is_answered_with_403(vertex: StandIn, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", vertex.port), timeout=5) as connection:
        connection.sendall(head)
        assert connection.recv(1024).startswith(b"HTTP/1.1 403 ")


def test_a_client_written_in_rust_finds_its_way_by_the_environment_alone(vertex: StandIn) -> None:
    result = vertex.client("""
import obstore
from obstore.store import GCSStore
store = GCSStore("test-bucket")
obstore.put(store, "rust/a.bin", b"x" * 100_000)
try:
    obstore.put(store, "rust/a.bin", b"y", mode="create")
    second = "written"
except obstore.exceptions.AlreadyExistsError:
    second = "refused"
result = [len(obstore.get(store, "rust/a.bin").bytes()), second]
""")
    assert result == [100_000, "refused"]


def test_google_storage_shares_the_bucket_with_the_other_apis(vertex: StandIn, rest: Rest) -> None:
    result = vertex.client("""
from google.cloud import storage
bucket = storage.Client().bucket("test-bucket")
bucket.blob("a/b.txt").upload_from_string("hello")
result = [blob.name for blob in bucket.list_blobs(prefix="a/")]
""")
    assert result == ["a/b.txt"]
    bucket = rest.call("GET", f"storage/v1/b/{BUCKET}", api="storage")
    project = rest.call("GET", "v3/projects/demo", api="cloudresourcemanager")
    assert project["name"] == f"projects/{bucket['projectNumber']}"
