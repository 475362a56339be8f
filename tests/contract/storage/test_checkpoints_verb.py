"""`penstock checkpoints` on gs://, as the process that a user starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from google.cloud import storage as gcs

from compiled import ROOT
from made_checkpoints import FIRST, save, write_objects
from penstock_pipelines.local import find_server
from penstock_pipelines.settings import load_settings
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.storage import GcsStorage


def checkpoints(endpoint: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a directory without a stand-in's state; the stock client's own variable leads it to the server."""
    command = [sys.executable, "-m", "penstock_pipelines.cli", "--settings", str(ROOT / "penstock.toml")]
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": endpoint, "GOOGLE_CLOUD_PROJECT": "demo"}
    return subprocess.run(
        [*command, "checkpoints", *arguments], env=environment, cwd=directory, capture_output=True, text=True
    )


def test_a_root_in_a_bucket_is_listed_verified_and_cleaned(
    endpoint: str, client: gcs.Client, bucket: gcs.Bucket, tmp_path: Path
) -> None:
    root = CheckpointRoot(f"gs://{bucket.name}/run/train/checkpoints", GcsStorage(client))
    save(root, 10)
    write_objects(root, 20, FIRST)
    listed = checkpoints(endpoint, tmp_path, "list", root.uri)
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines()[-1] == f"{root.uri}: 1 whole, 1 not committed; 5.49 kB"
    verified = checkpoints(endpoint, tmp_path, "verify", root.uri)
    assert (verified.returncode, verified.stdout[:3]) == (0, "ok ")
    # The objects are seconds old.
    time.sleep(0.1)
    cleaned = checkpoints(endpoint, tmp_path, "gc", root.uri, "--older-than", "0.00001", "--delete")
    assert cleaned.returncode == 0, cleaned.stderr
    assert root.steps() == [10]
    damaged = next(iter(bucket.list_blobs(prefix="run/train/checkpoints/step-00000010/")))
    damaged.upload_from_string("short")
    verified = checkpoints(endpoint, tmp_path, "verify", root.uri)
    assert verified.returncode == 1
    assert f"BAD gs://{bucket.name}/{damaged.name} is not the object that was written" in verified.stdout


def test_a_wrong_bucket_and_a_wrong_directory_are_the_users_errors(
    endpoint: str, client: gcs.Client, bucket: gcs.Bucket, tmp_path: Path
) -> None:
    missing = checkpoints(endpoint, tmp_path, "list", "gs://b-nobodys/checkpoints")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "gs://b-nobodys" in missing.stderr
    assert "does not exist" in missing.stderr
    save(CheckpointRoot(f"gs://{bucket.name}/run/train/checkpoints", GcsStorage(client)), 10)
    above = checkpoints(endpoint, tmp_path, "list", f"gs://{bucket.name}/run")
    assert above.returncode == 2
    assert f"There are some below gs://{bucket.name}/run/train/checkpoints; give that." in above.stderr


class Forbids(BaseHTTPRequestHandler):
    """Cloud Storage for an account that may do nothing."""

    def do_GET(self) -> None:
        body = json.dumps(
            {"error": {"code": 403, "message": "a@b.iam does not have storage.objects.list access"}}
        )
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Not on the test's stderr."""


@pytest.mark.parametrize("verb", ["list", "verify", "gc"])
def test_a_bucket_without_permission_is_told_as_that(tmp_path: Path, verb: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forbids)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        refused = checkpoints(endpoint, tmp_path, verb, "gs://b/checkpoints")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "does not have storage.objects.list access" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_run_of_the_stand_in_is_found_by_its_id_whether_the_stand_in_runs_or_not(tmp_path: Path) -> None:
    state = tmp_path / "state"
    penstock = [sys.executable, "-m", "penstock_pipelines.cli", "--settings", str(ROOT / "penstock.toml")]
    settings = load_settings(ROOT / "penstock.toml")
    uri = f"{settings.pipeline_root}/run-7/train/checkpoints"
    program = "import sys; from made_checkpoints import *; save(CheckpointRoot(sys.argv[1]), 10)"
    subprocess.run([*penstock, "local", "up", "--state", str(state)], check=True, capture_output=True)
    server = find_server(state)
    assert server is not None
    try:
        environment = server.environment() | {"PYTHONPATH": str(ROOT / "tests")}
        subprocess.run([sys.executable, "-c", program, uri], env=environment, check=True)
        asked = [*penstock, "checkpoints", "list", "run-7", "--state", str(state)]
        running = subprocess.run(asked, capture_output=True, text=True)
    finally:
        server.stop()
    stopped = subprocess.run(asked, capture_output=True, text=True)
    for listed in (running, stopped):
        assert listed.returncode == 0, listed.stderr
        assert listed.stdout.splitlines()[-1] == f"{uri}: 1 whole; 5.49 kB"
