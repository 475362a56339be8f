"""google-cloud-storage, unmodified, against the running server."""

from __future__ import annotations

import base64
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.api_core.exceptions import (
    BadRequest,
    Conflict,
    MethodNotImplemented,
    NotFound,
    NotModified,
    PreconditionFailed,
    RequestRangeNotSatisfiable,
)
from google.cloud import storage
from google.cloud.storage import transfer_manager
from google.cloud.storage.exceptions import InvalidResponse

MIB = 1 << 20


def test_a_bucket_carries_the_project_number(client: storage.Client, bucket: storage.Bucket) -> None:
    found = client.get_bucket(bucket.name)
    assert found.project_number == 123456789012
    assert (found.location, found.storage_class, found.metageneration) == ("US", "STANDARD", 1)
    assert found.time_created is not None
    assert bucket.name in [each.name for each in client.list_buckets()]
    assert client.lookup_bucket("no-such-bucket") is None
    with pytest.raises(Conflict):
        client.create_bucket(bucket.name)


def test_a_bucket_is_made_with_location_labels_and_uniform_access(client: storage.Client) -> None:
    wanted = client.bucket("labelled")
    wanted.labels = {"team": "a"}
    wanted.iam_configuration.uniform_bucket_level_access_enabled = True
    made = client.create_bucket(wanted, location="europe-west4")
    assert (made.location, made.location_type, made.labels) == ("EUROPE-WEST4", "region", {"team": "a"})
    made.labels = {"team": "b", "cost": "1"}
    made.patch()
    assert client.get_bucket("labelled").labels == {"team": "b", "cost": "1"}
    made.delete()


def test_what_a_bucket_cannot_do_is_refused_by_field(client: storage.Client, bucket: storage.Bucket) -> None:
    bucket.versioning_enabled = True
    with pytest.raises(MethodNotImplemented, match="versioning"):
        bucket.patch()
    with pytest.raises(MethodNotImplemented, match="softDeleted"):
        list(client.list_blobs(bucket.name, soft_deleted=True))


def test_a_policy_is_kept_and_every_permission_is_held(bucket: storage.Bucket) -> None:
    policy = bucket.get_iam_policy(requested_policy_version=3)
    policy.bindings.append({"role": "roles/storage.objectViewer", "members": {"user:a@example.com"}})
    bucket.set_iam_policy(policy)
    assert [binding["role"] for binding in bucket.get_iam_policy().bindings] == ["roles/storage.objectViewer"]
    asked = ["storage.objects.get", "storage.objects.create"]
    assert bucket.test_iam_permissions(asked) == asked


def test_an_uploaded_object_is_downloaded_as_it_was(bucket: storage.Bucket) -> None:
    data = os.urandom(100_000)
    blob = bucket.blob("a/b c+ü%2F?.bin")
    blob.metadata = {"step": "100"}
    blob.cache_control = "no-store"
    blob.upload_from_string(data, content_type="application/x-test", checksum="md5")
    assert blob.size == len(data)
    found = bucket.get_blob(blob.name)
    assert found is not None
    assert (found.generation, found.metageneration, found.content_type) == (
        blob.generation,
        1,
        "application/x-test",
    )
    assert (found.metadata, found.cache_control) == ({"step": "100"}, "no-store")
    assert found.md5_hash == base64.b64encode(hashlib.md5(data).digest()).decode()
    assert found.download_as_bytes(checksum="md5") == data
    fresh = bucket.blob(blob.name)
    assert fresh.download_as_bytes(checksum="crc32c") == data
    assert (fresh.generation, fresh.crc32c, fresh.md5_hash) == (blob.generation, blob.crc32c, blob.md5_hash)


def test_ranges_are_read_and_one_behind_the_end_is_refused(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"0123456789")
    assert blob.download_as_bytes(start=2, end=4) == b"234"
    assert blob.download_as_bytes(start=7) == b"789"
    assert blob.download_as_bytes(start=-3) == b"789"
    assert blob.download_as_bytes(start=5, end=100) == b"56789"
    with pytest.raises(RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=10)


def test_an_empty_object_goes_up_and_down(bucket: storage.Bucket) -> None:
    blob = bucket.blob("empty")
    blob.upload_from_string(b"")
    assert blob.download_as_bytes() == b""
    with blob.open("wb", ignore_flush=True):
        pass
    assert bucket.get_blob("empty").size == 0  # type: ignore[union-attr]  # it was just written


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, MIB - 1, MIB, 2 * MIB + 5])
@pytest.mark.parametrize("size_known", [True, False])
def test_a_resumable_upload_in_chunks_stores_every_byte(
    bucket: storage.Bucket, tmp_path: Path, size: int, size_known: bool
) -> None:
    data = os.urandom(size)
    path = tmp_path / "payload"
    path.write_bytes(data)
    blob = bucket.blob("resumable", chunk_size=256 * 1024)
    blob.metadata = {"k": "v"}
    with path.open("rb") as file:
        blob._do_resumable_upload(
            blob.client,
            file,
            "text/x",
            size if size_known else None,
            None,
            None,
            None,
            None,
            None,
            checksum="crc32c",
        )
    fresh = bucket.get_blob("resumable")
    assert fresh is not None
    assert (fresh.size, fresh.content_type, fresh.metadata) == (size, "text/x", {"k": "v"})
    assert fresh.download_as_bytes(checksum="md5") == data


def test_a_large_file_goes_up_by_itself_as_resumable_and_down_in_chunks(
    bucket: storage.Bucket, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(12 * MIB + 3))
    bucket.blob("large").upload_from_filename(source, checksum="crc32c")
    chunked = bucket.blob("large", chunk_size=MIB)
    chunked.download_to_filename(target)
    assert target.read_bytes() == source.read_bytes()


def test_a_writer_and_a_reader_stream(bucket: storage.Bucket) -> None:
    data = os.urandom(3 * MIB + 17)
    with bucket.blob("stream").open("wb", chunk_size=256 * 1024, if_generation_match=0) as writer:
        for start in range(0, len(data), 100_000):
            writer.write(data[start : start + 100_000])
    with bucket.blob("stream").open("rb", chunk_size=MIB) as reader:
        reader.seek(MIB)
        assert reader.read(10) == data[MIB : MIB + 10]
        reader.seek(0)
        assert reader.read() == data
    writer = bucket.blob("stream").open("wb", if_generation_match=0, ignore_flush=True)
    writer.write(b"again")
    with pytest.raises(InvalidResponse, match="412"):
        writer.close()
    # Left open, it closes itself again when it is collected, which may happen in a thread of the server.
    writer.terminate()


@pytest.mark.parametrize("chunk_size", [None, 256 * 1024])
def test_a_create_is_refused_when_the_object_exists(bucket: storage.Bucket, chunk_size: int | None) -> None:
    blob = bucket.blob("once", chunk_size=chunk_size)
    blob.upload_from_string(b"first" * 100_000, if_generation_match=0)
    for other in (bucket.blob("once", chunk_size=chunk_size), blob):
        with pytest.raises(PreconditionFailed, match="ifGenerationMatch"):
            other.upload_from_string(b"second", if_generation_match=0)
    seen = blob.generation
    blob.upload_from_string(b"third", if_generation_match=seen)
    with pytest.raises(PreconditionFailed):
        bucket.blob("once", chunk_size=chunk_size).upload_from_string(b"fourth", if_generation_match=seen)
    assert bucket.blob("once").download_as_bytes() == b"third"


def test_of_concurrent_creates_over_the_wire_one_wins(bucket: storage.Bucket) -> None:
    def create(writer: int) -> bool:
        try:
            bucket.blob("owner").upload_from_string(str(writer), if_generation_match=0)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(create, range(6)))
    assert won.count(True) == 1
    assert bucket.blob("owner").download_as_bytes() == str(won.index(True)).encode()


def test_reads_keep_their_conditions(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    generation = blob.generation
    assert blob.exists(if_generation_match=generation)
    with pytest.raises(PreconditionFailed):
        bucket.blob("x").download_as_bytes(if_generation_match=1)
    with pytest.raises(NotModified):
        bucket.blob("x").reload(if_generation_not_match=generation)
    with pytest.raises(PreconditionFailed):
        bucket.blob("x").reload(if_etag_match="other")
    bucket.blob("x").reload(if_etag_match=blob.etag)
    blob.upload_from_string(b"newer")
    with pytest.raises(NotFound, match="no versioning"):
        bucket.blob("x", generation=generation).download_as_bytes()
    assert not bucket.blob("none").exists()


def test_a_listing_has_pages_prefixes_offsets_and_globs(
    client: storage.Client, bucket: storage.Bucket
) -> None:
    for name in ("a.txt", "run/1/x", "run/1/y", "run/2/x", "run/3", "z"):
        bucket.blob(name).upload_from_string(b"")

    def listed(**query: object) -> list[str]:
        return [blob.name for blob in client.list_blobs(bucket.name, **query)]

    assert listed(page_size=2) == ["a.txt", "run/1/x", "run/1/y", "run/2/x", "run/3", "z"]
    assert listed(max_results=3) == ["a.txt", "run/1/x", "run/1/y"]
    assert [len(list(page)) for page in client.list_blobs(bucket.name, page_size=4).pages] == [4, 2]
    folders = client.list_blobs(bucket.name, prefix="run/", delimiter="/", page_size=1)
    assert [blob.name for blob in folders] == ["run/3"]
    assert folders.prefixes == {"run/1/", "run/2/"}
    assert listed(start_offset="run/1/y", end_offset="run/3") == ["run/1/y", "run/2/x"]
    assert listed(match_glob="run/*/x") == ["run/1/x", "run/2/x"]
    assert listed(fields="items(name),nextPageToken", prefix="z") == ["z"]


def test_copies_rewrites_and_renames(client: storage.Client, bucket: storage.Bucket) -> None:
    blob = bucket.blob("dir/x")
    blob.metadata = {"k": "v"}
    blob.upload_from_string(b"data", content_type="text/plain")
    copied = bucket.copy_blob(blob, bucket, "dir/y")
    assert (copied.download_as_bytes(), copied.content_type, copied.metadata) == (
        b"data",
        "text/plain",
        {"k": "v"},
    )
    with pytest.raises(PreconditionFailed):
        bucket.copy_blob(blob, bucket, "dir/y", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        bucket.copy_blob(blob, bucket, "new", if_source_generation_match=1)
    target = bucket.blob("rewritten")
    target.content_type = "text/html"
    assert target.rewrite(blob) == (None, 4, 4)
    assert (target.content_type, bucket.get_blob("rewritten").metadata) == ("text/html", None)  # type: ignore[union-attr]
    blob.update_storage_class("NEARLINE")
    assert bucket.get_blob("dir/x").storage_class == "NEARLINE"  # type: ignore[union-attr]
    bucket.rename_blob(copied, "moved")
    assert {each.name for each in client.list_blobs(bucket.name)} == {"dir/x", "moved", "rewritten"}


def test_compose_joins_objects(bucket: storage.Bucket) -> None:
    parts = [bucket.blob(f"part-{number}") for number in range(3)]
    for number, part in enumerate(parts):
        part.upload_from_string(str(number) * 3)
    whole = bucket.blob("whole")
    whole.content_type = "text/plain"
    generations = [part.generation for part in parts]
    whole.compose(parts, if_generation_match=0, if_source_generation_match=generations)
    assert (whole.component_count, whole.md5_hash, whole.content_type) == (3, None, "text/plain")
    assert whole.download_as_bytes() == b"000111222"
    with pytest.raises(PreconditionFailed):
        bucket.blob("other").compose(parts, if_source_generation_match=[1, 2, 3])


def test_metadata_is_patched_and_replaced(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    blob.metadata = {"a": "1", "b": "2"}
    blob.upload_from_string(b"data", content_type="text/plain")
    blob.metadata = {"a": "3", "b": None}
    blob.patch(if_metageneration_match=1)
    found = bucket.get_blob("x")
    assert found is not None
    assert (found.metadata, found.metageneration, found.content_type) == ({"a": "3"}, 2, "text/plain")
    found.metadata = None
    found.patch()
    assert bucket.get_blob("x").metadata is None  # type: ignore[union-attr]
    found.cache_control = "no-store"
    found.update()
    assert bucket.get_blob("x").cache_control == "no-store"  # type: ignore[union-attr]
    with pytest.raises(PreconditionFailed):
        found.patch(if_metageneration_match=1)


def test_what_an_object_cannot_do_is_refused_by_name(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    blob.temporary_hold = True
    with pytest.raises(MethodNotImplemented, match="temporaryHold"):
        blob.patch()
    with pytest.raises(MethodNotImplemented, match="predefinedAcl"):
        bucket.blob("y").upload_from_string(b"data", predefined_acl="publicRead")
    encrypted = bucket.blob("z", encryption_key=os.urandom(32))
    with pytest.raises(MethodNotImplemented, match="x-goog-encryption"):
        encrypted.upload_from_string(b"x" * MIB)


def test_a_batch_answers_every_call(client: storage.Client, bucket: storage.Bucket) -> None:
    for number in range(5):
        bucket.blob(f"x/ü {number}").upload_from_string(b"")
    blobs = list(client.list_blobs(bucket.name))
    with client.batch():
        bucket.delete_blobs(blobs)
    assert list(client.list_blobs(bucket.name)) == []

    blob = bucket.blob("patched")
    blob.upload_from_string(b"")
    with client.batch():
        blob.metadata = {"k": "ü"}
        blob.patch()
    assert blob.metadata == {"k": "ü"}
    with pytest.raises(NotFound, match="none"), client.batch():
        bucket.delete_blobs(["none", "patched"])
    assert not blob.exists()


def test_chunks_go_up_concurrently_as_an_xml_multipart_upload(bucket: storage.Bucket, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(17 * MIB + 5))
    blob = bucket.blob("dir/ü large")
    blob.metadata = {"k": "v"}
    for checksum in ("crc32c", "md5"):
        transfer_manager.upload_chunks_concurrently(
            source, blob, content_type="text/x", chunk_size=5 * MIB, worker_type="thread", checksum=checksum
        )
    found = bucket.get_blob("dir/ü large")
    assert found is not None
    assert (found.size, found.metadata, found.md5_hash) == (17 * MIB + 5, {"k": "v"}, None)
    transfer_manager.download_chunks_concurrently(found, target, chunk_size=4 * MIB, worker_type="thread")
    assert target.read_bytes() == source.read_bytes()


def test_parts_that_are_too_small_are_refused(bucket: storage.Bucket, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(2 * MIB))
    with pytest.raises(InvalidResponse, match="400"):
        transfer_manager.upload_chunks_concurrently(
            source, bucket.blob("x"), chunk_size=MIB, worker_type="thread", retry=None
        )
    assert not bucket.blob("x").exists()


def test_many_files_go_up_and_down(bucket: storage.Bucket, tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = [f"dir/{number}" for number in range(12)]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name * 100)
    for expected in (type(None), PreconditionFailed):  # the second time they are there
        results = transfer_manager.upload_many_from_filenames(
            bucket, names, source_directory=source, skip_if_exists=False, worker_type="thread",
            upload_kwargs={"if_generation_match": 0},
        )  # fmt: skip
        assert {type(result) for result in results} == {expected}
    target = tmp_path / "target"
    transfer_manager.download_many_to_path(
        bucket, names, destination_directory=target, worker_type="thread", raise_exception=True
    )
    assert all((target / name).read_text() == name * 100 for name in names)


def test_an_upload_whose_checksum_is_wrong_is_refused(bucket: storage.Bucket) -> None:
    blob = bucket.blob("x")
    for field, value in (("crc32c", "AAAAAA=="), ("md5_hash", base64.b64encode(bytes(16)).decode())):
        damaged = bucket.blob("x")
        setattr(damaged, field, value)
        with pytest.raises(BadRequest, match="doesn't match"):
            damaged.upload_from_string(b"data", checksum=None)
        assert not blob.exists()


def test_names_that_cloud_storage_refuses_are_refused(client: storage.Client, bucket: storage.Bucket) -> None:
    with pytest.raises(BadRequest, match="Invalid object name"):
        bucket.blob("x" * 1025).upload_from_string(b"")
    with pytest.raises(BadRequest, match="Invalid bucket name"):
        client.create_bucket("Upper-Case")
    with pytest.raises(NotFound):
        client.bucket("no-such-bucket").blob("x").upload_from_string(b"")
