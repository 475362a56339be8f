"""obstore, unmodified, against the running server: the XML API."""

from __future__ import annotations

import os
from collections.abc import Iterator

import obstore
import pytest
from google.cloud import storage
from obstore.exceptions import AlreadyExistsError, NotModifiedError, PreconditionError
from obstore.store import GCSStore

MIB = 1 << 20


def test_what_obstore_puts_it_gets_and_google_reads(gcs: GCSStore, bucket: storage.Bucket) -> None:
    data = os.urandom(100_000)
    attributes = {"Content-Type": "text/x", "Cache-Control": "no-store", "k": "v"}
    written = obstore.put(gcs, "dir/ü x+y%", data, attributes=attributes)  # type: ignore[arg-type]  # its stubs lack k
    found = obstore.get(gcs, "dir/ü x+y%")
    assert bytes(found.bytes()) == data
    assert found.meta["version"] == written["version"]
    assert found.attributes["Content-Type"] == "text/x"
    seen = bucket.get_blob("dir/ü x+y%")
    assert seen is not None
    assert (seen.download_as_bytes(), seen.metadata, str(seen.generation)) == (
        data,
        {"k": "v"},
        written["version"],
    )


def test_what_google_writes_obstore_gets(gcs: GCSStore, bucket: storage.Bucket) -> None:
    bucket.blob("a//b").upload_from_string(b"data")
    bucket.blob("x").upload_from_string(b"data")
    head = obstore.head(gcs, "x")
    assert (head["size"], bytes(obstore.get(gcs, "x").bytes())) == (4, b"data")
    with pytest.raises(FileNotFoundError):
        obstore.get(gcs, "none")


def test_ranges_are_read(gcs: GCSStore) -> None:
    obstore.put(gcs, "x", b"0123456789")
    assert bytes(obstore.get_range(gcs, "x", start=2, length=3)) == b"234"
    assert [bytes(part) for part in obstore.get_ranges(gcs, "x", starts=[0, 8], lengths=[2, 2])] == [
        b"01",
        b"89",
    ]
    assert bytes(obstore.get(gcs, "x", options={"range": {"suffix": 2}}).bytes()) == b"89"


def test_a_create_and_an_update_keep_their_conditions(gcs: GCSStore) -> None:
    written = obstore.put(gcs, "once", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(gcs, "once", b"second", mode="create")
    obstore.put(gcs, "once", b"third", mode=written)  # type: ignore[arg-type]  # a PutResult is an UpdateVersion
    with pytest.raises(PreconditionError):
        obstore.put(gcs, "once", b"fourth", mode=written)  # type: ignore[arg-type]
    assert bytes(obstore.get(gcs, "once").bytes()) == b"third"


def test_reads_keep_their_etag_conditions(gcs: GCSStore) -> None:
    etag = obstore.put(gcs, "x", b"data")["e_tag"]
    assert etag is not None
    assert bytes(obstore.get(gcs, "x", options={"if_match": etag}).bytes()) == b"data"
    with pytest.raises(NotModifiedError):
        obstore.get(gcs, "x", options={"if_none_match": etag})
    with pytest.raises(PreconditionError):
        obstore.get(gcs, "x", options={"if_match": '"other"'})


def test_a_multipart_put_stores_every_byte(gcs: GCSStore, bucket: storage.Bucket) -> None:
    data = os.urandom(16 * MIB + 7)
    written = obstore.put(gcs, "large", data, use_multipart=True, chunk_size=5 * MIB, attributes={"k": "v"})  # type: ignore[arg-type]
    seen = bucket.get_blob("large")
    assert seen is not None
    assert (str(seen.generation), seen.md5_hash, seen.metadata) == (written["version"], None, {"k": "v"})
    assert seen.download_as_bytes(checksum="crc32c") == data
    assert bytes(obstore.get(gcs, "large").bytes()) == data


def test_a_multipart_put_that_fails_leaves_nothing(gcs: GCSStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        raise RuntimeError("the source broke")

    with pytest.raises(Exception, match="the source broke"):
        obstore.put(gcs, "broken", pieces(), use_multipart=True, chunk_size=5 * MIB)
    with pytest.raises(FileNotFoundError):
        obstore.head(gcs, "broken")


def test_listings_have_prefixes_and_offsets(gcs: GCSStore, bucket: storage.Bucket) -> None:
    for name in ("a.txt", "run/1/x", "run/2/x", "run/3 & <4>", "z"):
        bucket.blob(name).upload_from_string(b"data")
    listed = [meta["path"] for batch in obstore.list(gcs) for meta in batch]
    assert listed == ["a.txt", "run/1/x", "run/2/x", "run/3 & <4>", "z"]
    after = [meta["path"] for batch in obstore.list(gcs, offset="run/2/x") for meta in batch]
    assert after == ["run/3 & <4>", "z"]
    folder = obstore.list_with_delimiter(gcs, "run")
    assert list(folder["common_prefixes"]) == ["run/1", "run/2"]
    assert [(meta["path"], meta["size"]) for meta in folder["objects"]] == [("run/3 & <4>", 4)]


def test_copies_renames_and_deletes(gcs: GCSStore) -> None:
    obstore.put(gcs, "dir/x", b"data")
    obstore.copy(gcs, "dir/x", "y")
    with pytest.raises(AlreadyExistsError):
        obstore.copy(gcs, "dir/x", "y", overwrite=False)
    obstore.rename(gcs, "dir/x", "z")
    assert bytes(obstore.get(gcs, "z").bytes()) == b"data"
    obstore.delete(gcs, ["y", "z"])
    assert [meta for batch in obstore.list(gcs) for meta in batch] == []
