"""Writers whose buffer holds two small tensors, every byte of which is the step. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.checkpoints.layout import PlannedChunk, PlannedObject, TensorInfo
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.checkpoints.writer import Setup, Writer
from penstock_trainer.contract.checkpoint import FORMAT_VERSION, Best, Manifest, Owner
from penstock_trainer.contract.fields import canonical_json, to_dict
from penstock_trainer.storage import FileStorage, Storage

NBYTES = 256
TENSORS = {
    "weight": TensorInfo(dtype="float32", shape=(4, 5)),
    "bias": TensorInfo(dtype="float32", shape=(3,)),
}
# The first has a gap before its second chunk, as alignment leaves one.
OBJECTS = (
    PlannedObject(
        name="0-0.distcp",
        begin=0,
        end=76,
        chunks=(
            PlannedChunk(fqn="bias", offsets=(0,), sizes=(3,), begin=0, length=12),
            PlannedChunk(fqn="weight", offsets=(0, 0), sizes=(1, 3), begin=64, length=12),
        ),
    ),
    PlannedObject(
        name="0-1.distcp",
        begin=128,
        end=196,
        chunks=(
            PlannedChunk(fqn="weight", offsets=(0, 3), sizes=(1, 2), begin=128, length=8),
            PlannedChunk(fqn="weight", offsets=(1, 0), sizes=(3, 5), begin=136, length=60),
        ),
    ),
)
KEEP_ALL = Retention(last=0, every=0, best=False)


class Job:
    """One attempt on a root, which it takes over, in this process."""

    def __init__(
        self, root: Path, storage: Storage | None = None, *, retention: Retention = KEEP_ALL
    ) -> None:
        self.root = root
        self.owner = take_ownership(root.as_uri(), FileStorage())
        self.setup = setup_of(root, self.owner, retention=retention)
        self._buffer = bytearray(NBYTES)
        self._writer = Writer(self.setup, memoryview(self._buffer), storage or FileStorage())

    @property
    def attempt(self) -> str:
        return self.owner.attempt

    def write(self, step: int, directory: str = "") -> Mapping[str, Any]:
        """The receipt as it reaches the rank that commits."""
        self._buffer[:] = bytes([step]) * NBYTES
        receipt = self._writer.write(step, directory or self.attempt)
        told: Mapping[str, Any] = json.loads(canonical_json(receipt))
        return told

    def commit(
        self, step: int, receipt: Mapping[str, Any], directory: str = "", *, best: Best | None = None
    ) -> None:
        manifest = manifest_of(self.owner, step, best=best)
        self._writer.commit(manifest, directory or self.attempt, [receipt])

    def save(self, *steps: int, directory: str = "", best: Best | None = None) -> None:
        """As the writer's process does it: pruned after each."""
        for step in steps:
            self.commit(step, self.write(step, directory), directory, best=best)
            self.prune()

    def prune(self, *, is_asked: Callable[[], bool] = lambda: False) -> None:
        self._writer.prune(is_asked=is_asked)


class Watched(FileStorage):
    """Runs `before` ahead of each operation, with its name and URI."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self._before = before

    def read(self, uri: str, **options: Any) -> bytes:
        self._before("read", uri)
        return super().read(uri, **options)

    def write(self, uri: str, data: Any, **options: Any) -> Any:
        self._before("write", uri)
        return super().write(uri, data, **options)

    def stat(self, uri: str) -> Any:
        self._before("stat", uri)
        return super().stat(uri)

    def delete(self, uri: str, **options: Any) -> None:
        self._before("delete", uri)
        super().delete(uri, **options)


def setup_of(root: Path, owner: Owner, *, retention: Retention = KEEP_ALL, **change: Any) -> Setup:
    told: dict[str, Any] = {
        "root_uri": root.as_uri(),
        "owner": owner,
        "objects": OBJECTS,
        "tensors": TENSORS,
        "retention": retention,
    }
    return Setup(**{**told, **change})


def manifest_of(owner: Owner, step: int, *, best: Best | None = None) -> Mapping[str, Any]:
    """What the trainer knows of it."""
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "samples_seen": 12 * step,
        "tokens_seen": 384 * step,
        "best": to_dict(best),
        "stale_evaluations": 0,
        "config": {},
        "config_hash": "c0ffee",
        "tokenizer_sha256": "ab" * 32,
        "strategy": "fsdp-full",
        "world_size": 1,
        "versions": {},
        "attempt": owner.attempt,
        "fencing_token": owner.fencing_token,
    }


def manifest(root: Path, step: int) -> Manifest:
    return CheckpointRoot(root.as_uri()).manifest(step)


def committed(root: Path) -> list[int]:
    """Steps that have a manifest, oldest first."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/manifest.json"))


def require_whole(root: Path, step: int) -> None:
    """All bytes are those of the manifest, of one attempt, and of this step."""
    found = manifest(root, step)
    assert verify(CheckpointRoot(root.as_uri()), step) == []
    directories = {entry.name.rpartition("/")[0] for entry in found.objects}
    assert len(directories) == 1
    assert re.fullmatch(rf"{found.attempt}(-\d+)?", directories.pop())
    for entry in found.objects:
        if entry.name != found.index:
            assert set((root / f"step-{step:08d}" / entry.name).read_bytes()) == {step}
