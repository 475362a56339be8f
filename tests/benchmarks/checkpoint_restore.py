"""CPU time of having a checkpoint back in its tensors, from a server that speaks Cloud Storage's protocol.

    python -m benchmarks.checkpoint_restore serve DIRECTORY       the server; prints its endpoint, until stdin is closed
    python -m benchmarks.checkpoint_restore prepare ENDPOINT      a checkpoint of ours, and the same state by torch.save
    python -m benchmarks.checkpoint_restore ours|blob ENDPOINT    reads it; prints {"cpu_seconds", "bytes"}

`blob` is google-cloud-storage's download and torch.load. Both sides verify: ours every chunk's CRC32C, Blob the object's.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from benchmarks.checkpoint_stall import STATE_BYTES, state_of, tensors_of
from benchmarks.process_cpu import clean_environment
from benchmarks.transfer_arms import BUCKET, client_of
from penstock_local.storage import ObjectStore, build_app
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.checkpoints.commit import Committer
from penstock_trainer.checkpoints.reader import ObjectReader
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.checkpoints.save_plan import plan_save
from penstock_trainer.checkpoints.writer import Setup, Writer
from penstock_trainer.contract.checkpoint import FORMAT_VERSION, Owner, step_dir_uri
from penstock_trainer.contract.fields import to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import GcsStorage
from penstock_trainer.world import World

_ROOT = f"gs://{BUCKET}/root"
_PEER = "state.pt"
_STEP = 1


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """A server with both checkpoints, in a process of its own; its endpoint. Raises RuntimeError when it does not start."""
    argv = [sys.executable, "-m", "benchmarks.checkpoint_restore"]
    server = subprocess.Popen(
        [*argv, "serve", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError(f"{' '.join(argv)} ended with {server.wait()}")
        subprocess.run([*argv, "prepare", endpoint], env=clean_environment(), check=True)
        yield endpoint
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()


def measured(side: str, endpoint: str) -> Mapping[str, float]:
    """What one side costs in a process of its own; see this module."""
    argv = [sys.executable, "-m", "benchmarks.checkpoint_restore", side, endpoint]
    done = subprocess.run(argv, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: Mapping[str, float] = json.loads(done.stdout)
    return found


def _serve(directory: Path) -> None:
    store = ObjectStore(directory)
    app = build_app(store, project_id="bench", project_number=1)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http="httptools", log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    sys.stdin.read()
    server.should_exit = True
    thread.join()
    store.close()


def _prepare(endpoint: str, world: World) -> None:
    client, state = client_of(endpoint), state_of(STATE_BYTES)
    bucket = client.create_bucket(BUCKET)
    file = io.BytesIO()
    torch.save(state, file)
    bucket.blob(_PEER).upload_from_string(file.getvalue())
    _save(GcsStorage(client), state, world)


def _save(storage: GcsStorage, state: State, world: World) -> None:
    plan = plan_save(state, world)
    buffer = torch.zeros(plan.layout.nbytes, dtype=torch.uint8)
    plan.fill(state, buffer)
    owner = Owner(attempt="bench", fencing_token=1)
    retention = Retention(last=0, every=0, best=False)
    setup = Setup(
        root_uri=_ROOT,
        owner=owner,
        asks_owner=False,
        objects=plan.layout.objects,
        tensors=plan.tensors,
        retention=retention,
    )
    receipt = Writer(setup, buffer.numpy().data, storage).write(_STEP, owner.attempt)
    committer = Committer(
        _ROOT, owner, storage, check_owner=lambda: None, tensors=plan.tensors, retention=retention
    )
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": _STEP,
        "samples_seen": 0,
        "tokens_seen": 0,
        "config": {},
        "config_hash": "",
        "tokenizer_sha256": "",
        "strategy": "ddp",
        "world_size": 1,
        "versions": {},
        "attempt": owner.attempt,
        "fencing_token": owner.fencing_token,
    }
    committer.commit(manifest, owner.attempt, [to_dict(receipt)])


def _ours(endpoint: str, state: State, world: World) -> None:
    storage = GcsStorage(client_of(endpoint))
    manifest = CheckpointRoot(_ROOT, storage).whole(_STEP)
    reader = ObjectReader(storage, step_dir_uri(_ROOT, _STEP), manifest)
    dcp_load(state, storage_reader=reader, process_group=world.control)


def _blob(endpoint: str, state: State) -> None:
    data = client_of(endpoint).bucket(BUCKET).blob(_PEER).download_as_bytes()
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    with torch.no_grad():
        for target, source in zip(tensors_of(state), tensors_of(loaded), strict=True):
            target.copy_(source)


def main(argv: list[str]) -> None:
    """See the module."""
    if argv[0] == "serve":
        _serve(Path(argv[1]))
        return
    torch.set_num_threads(1)
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=60) as world:
        if argv[0] == "prepare":
            _prepare(argv[1], world)
            return
        state = state_of(STATE_BYTES)
        before = float(state["model"]["layers.0.weight"][0, 0])
        began = time.process_time()
        _ours(argv[1], state, world) if argv[0] == "ours" else _blob(argv[1], state)
        spent = time.process_time() - began
        if float(state["model"]["layers.0.weight"][0, 0]) == before:
            raise RuntimeError(f"{argv[0]} has filled nothing")
    print(json.dumps({"cpu_seconds": spent, "bytes": STATE_BYTES}))


if __name__ == "__main__":
    main(sys.argv[1:])
