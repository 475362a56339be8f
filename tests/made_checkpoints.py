"""Checkpoints as a run leaves them, made without one: real objects, an index of them, and the manifest."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    Owner,
    manifest_uri,
    owner_uri,
    step_dir_uri,
)
from penstock_trainer.storage import crc32c, join

FIRST, SECOND = "aaaaaaaa", "bbbbbbbb"
"""Attempts."""


def write_objects(
    root: CheckpointRoot, step: int, attempt: str, *, ranks: int = 2
) -> tuple[CheckpointObject, ...]:
    """Of a save that has not come to its manifest: a tensor of a model and one of an optimizer on each rank."""
    chunks: dict[str, list[dict[str, Any]]] = {"model.weight": [], "opt.state.weight.exp_avg": []}
    entries = []
    for rank in range(ranks):
        name, data = f"{attempt}/{rank}-0.distcp", random.Random(f"{step}/{attempt}/{rank}").randbytes(2400)
        for place, tensor in enumerate(chunks):
            chunks[tensor].append(
                {
                    "offsets": [rank * 100, 0],
                    "sizes": [100, 3],
                    "object": name,
                    "byte_offset": place * 1200,
                    "length": 1200,
                    "crc32c": crc32c(data[place * 1200 :][:1200]),
                }
            )
        entries.append(write_object(root, step, name, data))
    tensors = {
        name: {"dtype": "float32", "shape": [ranks * 100, 3], "chunks": of_tensor}
        for name, of_tensor in chunks.items()
    }
    index = json.dumps({"tensors": tensors}).encode()
    return (*entries, write_object(root, step, f"{attempt}/index.json", index))


def write_object(root: CheckpointRoot, step: int, name: str, data: bytes) -> CheckpointObject:
    """An object of the step, and how a manifest names it."""
    info = root.storage.write(join(step_dir_uri(root.uri, step), name), data)
    return CheckpointObject(
        name=name,
        generation=info.generation,
        size=info.size,
        crc32c=info.crc32c,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def save(root: CheckpointRoot, step: int, *, attempt: str = FIRST, token: int = 1, **change: Any) -> Manifest:
    """A whole checkpoint."""
    return commit(root, step, write_objects(root, step, attempt), attempt=attempt, token=token, **change)


def commit(
    root: CheckpointRoot,
    step: int,
    objects: tuple[CheckpointObject, ...],
    *,
    attempt: str,
    token: int = 1,
    **change: Any,
) -> Manifest:
    """Write the manifest of objects whose last is the index; what stands in its place is replaced."""
    told: dict[str, Any] = {
        "format_version": 2,
        "step": step,
        "samples_seen": step * 12,
        "tokens_seen": step * 384,
        "config": {"seed": 7, "model": {"dim": 32, "options": {}}},
        "config_hash": "c0ffee",
        "tokenizer_sha256": "ab" * 32,
        "strategy": "zero2",
        "world_size": 2,
        "versions": {"torch": "2.13"},
        "attempt": attempt,
        "fencing_token": token,
        "index": objects[-1].name,
        "objects": objects,
        "saved_at": 1795300000.0,
    }
    manifest = Manifest(**{**told, **change})
    root.storage.write(manifest_uri(root.uri, step), manifest.to_json().encode())
    return manifest


def own(root: CheckpointRoot, attempt: str, token: int) -> None:
    """Make an attempt the owner of the root."""
    owner = Owner(attempt=attempt, fencing_token=token)
    root.storage.write(owner_uri(root.uri), owner.to_json().encode())


def fixture_root(directory: Path, strategy: str) -> CheckpointRoot:
    """A copy of the stored checkpoint of a real run; copies of files have generations of their own, so it names those."""
    stored = Path(__file__).parent / "distributed/formats/format-1"
    shutil.copytree(stored / strategy, directory / strategy)
    for path in (directory / strategy).rglob("manifest.json"):
        told = json.loads(path.read_text())
        for entry in told["objects"]:
            entry["generation"] = (path.parent / entry["name"]).stat().st_mtime_ns
        path.write_text(json.dumps(told))
    return CheckpointRoot((directory / strategy).as_uri())
