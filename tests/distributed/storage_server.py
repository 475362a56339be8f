"""The stand-in's Cloud Storage alone, for runs that keep their checkpoints in a bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from penstock_local.storage import ObjectStore, build_app

BUCKET = "checkpoints"


@contextmanager
def storage_server(directory: Path) -> Iterator[str]:
    """Its endpoint; it has one bucket."""
    store = ObjectStore(directory)
    app = build_app(store, project_id="demo", project_number=123456789012)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, http="httptools", log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    store.create_bucket(BUCKET)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    store.close()


def environment_of(endpoint: str) -> Mapping[str, str]:
    """Variables that lead Google's client to it."""
    return {"STORAGE_EMULATOR_HOST": endpoint, "GOOGLE_CLOUD_PROJECT": "demo"}
