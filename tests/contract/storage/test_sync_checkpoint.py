"""sync_checkpoint between buckets: the service copies, the client describes and verifies."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from google.cloud import storage as gcs

from made_checkpoints import FIRST, commit, write_object, write_objects
from penstock_local.storage import ObjectStore, build_app
from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.contract.checkpoint import CheckpointObject
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.storage import GcsStorage, join

JOB = "https://europe-west4-aiplatform.googleapis.com/v1/projects/1/locations/europe-west4/customJobs/7"
RESOURCES = json.dumps({"resources": [{"resourceType": "CustomJob", "resourceUri": JOB}]})


class Counted:
    """The stand-in's storage, and what passes through a client of it."""

    def __init__(self, store: ObjectStore) -> None:
        self._app = build_app(store, project_id="demo", project_number=1)
        self.requests: list[tuple[str, str]] = []
        self.payload = 0
        """Bytes, in both directions."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append((scope["method"], scope["path"]))

        async def counted_receive() -> Any:
            message = await receive()
            self.payload += len(message.get("body", b""))
            return message

        async def counted_send(message: Any) -> None:
            self.payload += len(message.get("body", b""))
            await send(message)

        await self._app(scope, counted_receive, counted_send)


@pytest.fixture
def counted(store: ObjectStore) -> Counted:
    return Counted(store)


@pytest.fixture
def port(counted: Counted) -> Iterator[int]:
    config = uvicorn.Config(counted, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def run(directory: Path, port: int, **parameters: str) -> subprocess.CompletedProcess[str]:
    """The launcher as a task starts it."""
    artifacts = {
        name: {
            "artifacts": [{"name": name, "uri": f"{parameters['train_directory']}-{name}", "metadata": {}}]
        }
        for name in ("model", "checkpoint")
    }
    told = {
        "inputs": {"parameterValues": {"gcp_resources": RESOURCES, **parameters}},
        "outputs": {
            "artifacts": artifacts,
            "parameters": {"model_uri": {"outputFile": str(directory / "model_uri")}},
            "outputFile": str(directory / "output.json"),
        },
    }
    environment = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "GOOGLE_CLOUD_PROJECT": "demo",
    }
    command = [sys.executable, "-m", "penstock_components.launchers.sync_checkpoint"]
    return subprocess.run(
        [*command, "--executor-input", json.dumps(told)], env=environment, capture_output=True, text=True
    )


def train(directory: str, storage: GcsStorage) -> int:
    """What training leaves; bytes of it."""
    root = CheckpointRoot(join(directory, "checkpoints"), storage)
    big = write_object(root, 20, f"{FIRST}/7-0.distcp", os.urandom(3 << 20))
    objects = (big, *write_objects(root, 20, FIRST))
    manifest = commit(root, 20, objects, attempt=FIRST)
    weights = os.urandom(1 << 20)
    info = storage.write(join(directory, "model/model.safetensors"), weights)
    entry = CheckpointObject(
        name="model.safetensors",
        generation=info.generation,
        size=info.size,
        crc32c=info.crc32c,
        sha256=hashlib.sha256(weights).hexdigest(),
    )
    export = ExportManifest(
        format_version=1, step=20, tokens_seen=1, num_parameters=9, config={}, config_hash="c", dataset_uri="gs://b/d",
        world_size=2, attempt=FIRST, checkpoint_uri=directory, objects=(entry,),
    )  # fmt: skip
    storage.write(join(directory, "model/manifest.json"), export.to_json().encode())
    return manifest.size + info.size


def test_between_buckets_no_payload_passes_through_the_client_and_a_retry_copies_nothing(
    counted: Counted, port: int, client: gcs.Client, bucket: gcs.Bucket, tmp_path: Path
) -> None:
    storage = GcsStorage(client)
    second = client.create_bucket(f"{bucket.name}-2", location="ASIA-NORTHEAST1")
    try:
        train_directory = f"gs://{bucket.name}/pipeline-root/run-7/train"
        size = train(train_directory, storage)
        places = {"destination": f"gs://{second.name}/kept", "run_name": "run-7"}
        done = run(tmp_path, port, train_directory=train_directory, **places)
        assert done.returncode == 0, done.stderr
        root = CheckpointRoot(f"gs://{second.name}/kept/run-7/checkpoints", storage)
        assert verify(root, 20) == []
        copied = ExportManifest.from_json(storage.read(f"gs://{second.name}/kept/run-7/model/manifest.json"))
        [entry] = copied.objects
        info = storage.stat(f"gs://{second.name}/kept/run-7/model/model.safetensors")
        assert info is not None
        assert (info.generation, info.size, info.crc32c) == (entry.generation, entry.size, entry.crc32c)
        rewrites = sum("/rewriteTo/" in path for _, path in counted.requests)
        assert (
            rewrites == 2 * 5
        )  # to the artifacts and to the second bucket: four objects and the index or the model
        assert counted.payload < size / 20  # manifests and descriptions
        counted.requests.clear()
        assert run(tmp_path, port, train_directory=train_directory, **places).returncode == 0
        assert not any("/rewriteTo/" in path or method == "PUT" for method, path in counted.requests)
    finally:
        second.delete(force=True)


def test_a_bucket_that_does_not_exist_is_told_before_anything_is_copied(
    counted: Counted, port: int, client: gcs.Client, bucket: gcs.Bucket, tmp_path: Path
) -> None:
    train_directory = f"gs://{bucket.name}/pipeline-root/run-7/train"
    train(train_directory, GcsStorage(client))
    done = run(tmp_path, port, train_directory=train_directory, destination="gs://b-nobodys/kept")
    assert done.returncode == 1
    assert "destination = 'gs://b-nobodys/kept' cannot be used: " in done.stderr
    assert "the bucket does not exist" in done.stderr
    assert not any("/rewriteTo/" in path for _, path in counted.requests)
