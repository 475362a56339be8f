"""Copies between a bucket and a disk."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud import storage as gcs

from penstock_trainer import storage as penstock_storage
from penstock_trainer.storage import (
    PIECE_BYTES,
    ObjectCorruptError,
    ObjectNotFoundError,
    PreconditionFailedError,
    copy_object,
    crc32c,
    storage_for,
)


@pytest.fixture(autouse=True)
def process_storage(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's storage talks to the running server, led there by Google's own variables."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "demo")
    penstock_storage._storage_of.cache_clear()
    yield
    storage_for("gs://any/name")._client.close()  # type: ignore[attr-defined]  # of GcsStorage
    penstock_storage._storage_of.cache_clear()


@pytest.fixture(params=["to disk", "to a bucket", "on disk", "between buckets"])
def ends(request: pytest.FixtureRequest, bucket: gcs.Bucket, tmp_path: Path) -> tuple[str, str]:
    """Source and target."""
    on_disk, in_bucket = tmp_path.as_uri(), f"gs://{bucket.name}"
    return {
        "to disk": (f"{in_bucket}/source", f"{on_disk}/below/target"),
        "to a bucket": (f"{on_disk}/source", f"{in_bucket}/target"),
        "on disk": (f"{on_disk}/source", f"{on_disk}/target"),
        "between buckets": (f"{in_bucket}/source", f"{in_bucket}/target"),
    }[request.param]


def test_a_copy_has_the_same_bytes_and_keeps_conditions(ends: tuple[str, str]) -> None:
    source, target = ends
    first = storage_for(source).write(source, b"1")
    copied = copy_object(source, target, source_generation=first.generation, if_generation_match=0)
    assert storage_for(target).stat(target) == copied
    assert copied.crc32c == first.crc32c
    storage_for(source).write(source, b"2")
    with pytest.raises(PreconditionFailedError, match="target"):
        copy_object(source, target, if_generation_match=0)
    with pytest.raises(ObjectNotFoundError, match="source"):
        copy_object(source, target, source_generation=first.generation)
    assert copy_object(source, target, if_generation_match=copied.generation).crc32c == crc32c(b"2")
    with pytest.raises(ObjectNotFoundError, match="none"):
        copy_object(f"{source}-none", target)


def test_a_large_object_is_copied_a_piece_at_a_time(bucket: gcs.Bucket, tmp_path: Path) -> None:
    data, uri = os.urandom(4 * PIECE_BYTES + 5), f"gs://{bucket.name}/large"
    (tmp_path / "large").write_bytes(data)
    tracemalloc.start()
    up = copy_object((tmp_path / "large").as_uri(), uri)
    down = copy_object(uri, (tmp_path / "copy").as_uri(), source_generation=up.generation)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A piece being written, the one being read, and buffers of the server, which runs in this process.
    assert peak < 3 * PIECE_BYTES
    assert up.crc32c == down.crc32c == crc32c(data)
    assert (tmp_path / "copy").read_bytes() == data


def test_an_object_that_rotted_is_not_published_by_a_copy(
    bucket: gcs.Bucket, payloads: Path, tmp_path: Path
) -> None:
    uri, target, data = f"gs://{bucket.name}/rotten", (tmp_path / "copy").as_uri(), b"bytes to be copied" * 99
    storage_for(uri).write(uri, data)
    [payload] = [path for path in payloads.rglob("*") if path.is_file() and path.read_bytes() == data]
    payload.write_bytes(b"B" + data[1:])
    with pytest.raises(ObjectCorruptError, match="copy"):
        copy_object(uri, target)
    assert list(tmp_path.iterdir()) == []
