"""A running server, and Google's client and obstore pointed at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import obstore.store
import pytest
import requests
import uvicorn
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from penstock_local.storage import ObjectStore, build_app

PROJECT_NUMBER = 123456789012


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path_factory.mktemp("objects"))
    yield store
    store.close()


@pytest.fixture(scope="session")
def endpoint(store: ObjectStore) -> Iterator[str]:
    app = build_app(store, project_id="demo", project_number=PROJECT_NUMBER)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http="httptools", log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="session")
def client(endpoint: str) -> Iterator[storage.Client]:
    client = storage.Client(
        project="demo", credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint}
    )
    yield client
    client.close()


@pytest.fixture
def bucket(client: storage.Client, request: pytest.FixtureRequest) -> Iterator[storage.Bucket]:
    """A new bucket for each test."""
    bucket = client.create_bucket(f"b-{abs(hash(request.node.nodeid)):x}")
    yield bucket
    bucket.delete(force=True)


@pytest.fixture
def gcs(endpoint: str, bucket: storage.Bucket) -> obstore.store.GCSStore:
    return obstore.store.GCSStore(
        bucket.name,
        # `skip_signature` covers reads only: without a static token, writes ask the metadata server for one.
        config={"base_url": endpoint, "bearer_token": "not-checked-here"},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.fixture
def http() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture
def payloads(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of payloads, to see what is left behind."""
    return store.stage().path.parent
