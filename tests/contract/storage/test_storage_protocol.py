"""What `penstock_trainer.storage.Storage` promises, asked of every implementation."""

from __future__ import annotations

import concurrent.futures
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud import storage as gcs
from google.oauth2.credentials import Credentials as UserCredentials

from penstock_trainer.storage import (
    FileStorage,
    GcsStorage,
    ObjectCorruptError,
    ObjectNotFoundError,
    PreconditionFailedError,
    Storage,
    StorageError,
    UnsupportedUriError,
    crc32c,
    storage_for,
)

Place = tuple[Storage, str]


@pytest.fixture(params=["file", "gs", "gs, all through obstore"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A storage and a URI below which nothing stands."""
    if request.param == "file":
        return FileStorage(), (tmp_path / "a root").as_uri()
    client: gcs.Client = request.getfixturevalue("client")
    bucket: gcs.Bucket = request.getfixturevalue("bucket")
    obstore_bytes = None if request.param == "gs" else 0
    return GcsStorage(client, obstore_bytes=obstore_bytes), f"gs://{bucket.name}/a root"


def test_what_is_written_is_read_whole_and_in_ranges(place: Place) -> None:
    storage, root = place
    written = storage.write(f"{root}/a/b.bin", b"0123456789")
    assert (written.size, written.crc32c) == (10, crc32c(b"0123456789"))
    assert storage.read(f"{root}/a/b.bin") == b"0123456789"
    assert storage.read(f"{root}/a/b.bin", start=3, length=4) == b"3456"
    assert storage.read(f"{root}/a/b.bin", start=7) == b"789"
    assert storage.read(f"{root}/a/b.bin", start=3, length=0) == b""


def test_a_range_beyond_the_end_is_an_error(place: Place) -> None:
    storage, root = place
    storage.write(f"{root}/short", b"0123")
    with pytest.raises(ObjectCorruptError, match="asked for 10 bytes"):
        storage.read(f"{root}/short", start=2, length=10)


@pytest.mark.parametrize("data", [b"x" * 70_000, bytearray(b"abc"), memoryview(b"abc"), b""])
def test_any_buffer_can_be_written(place: Place, data: bytes) -> None:
    storage, root = place
    storage.write(f"{root}/buffer", data)
    assert storage.read(f"{root}/buffer") == bytes(data)


def test_a_missing_object_is_not_found(place: Place) -> None:
    storage, root = place
    assert storage.stat(f"{root}/none") is None
    for ask in (storage.read, storage.delete):
        with pytest.raises(ObjectNotFoundError, match="none"):
            ask(f"{root}/none")


def test_a_conditional_create_wins_once(place: Place) -> None:
    storage, root = place
    storage.write(f"{root}/once", b"first", if_generation_match=0)
    with pytest.raises(PreconditionFailedError):
        storage.write(f"{root}/once", b"second", if_generation_match=0)
    assert storage.read(f"{root}/once") == b"first"


def test_of_many_conditional_creates_at_once_exactly_one_wins(place: Place) -> None:
    storage, root = place

    def attempt(number: int) -> bool:
        try:
            storage.write(f"{root}/race", str(number).encode(), if_generation_match=0)
        except PreconditionFailedError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 1


def test_an_overwrite_is_conditional_on_the_generation_that_was_read(place: Place) -> None:
    storage, root = place
    first = storage.write(f"{root}/owner", b"1")
    second = storage.write(f"{root}/owner", b"2", if_generation_match=first.generation)
    assert second.generation != first.generation
    with pytest.raises(PreconditionFailedError):
        storage.write(f"{root}/owner", b"3", if_generation_match=first.generation)
    assert storage.read(f"{root}/owner") == b"2"


def test_an_overwrite_whose_answer_was_lost_finds_its_own_bytes(
    client: gcs.Client, bucket: gcs.Bucket
) -> None:
    storage, uri = GcsStorage(client), f"gs://{bucket.name}/owner"
    first = storage.write(uri, b"1", if_generation_match=0)
    assert storage.write(uri, b"1", if_generation_match=0) == first
    second = storage.write(uri, b"2", if_generation_match=first.generation)
    assert storage.write(uri, b"2", if_generation_match=first.generation) == second


def test_every_write_makes_another_generation(place: Place) -> None:
    storage, root = place
    generations = [storage.write(f"{root}/again", b"same").generation for _ in range(20)]
    assert len(set(generations)) == 20


def test_a_read_can_be_pinned_to_a_generation(place: Place) -> None:
    storage, root = place
    first = storage.write(f"{root}/pinned", b"1")
    assert storage.read(f"{root}/pinned", generation=first.generation) == b"1"
    storage.write(f"{root}/pinned", b"2")
    with pytest.raises(ObjectNotFoundError):
        storage.read(f"{root}/pinned", generation=first.generation)


def test_listing_is_by_prefix_and_sorted(place: Place) -> None:
    storage, root = place
    for name in ("step-2/x", "step-10/x", "step-2/a/y", "other"):
        storage.write(f"{root}/{name}", name.encode())
    names = [info.uri.removeprefix(f"{root}/") for info in storage.list_objects(f"{root}/step-2/")]
    assert [name.replace("%20", " ") for name in names][-1].endswith("step-2/x")
    assert len(names) == 2
    assert len(list(storage.list_objects(f"{root}/step-"))) == 3
    assert [uri.rpartition("/")[2] for uri in storage.list_dirs(root)] == ["step-10", "step-2"]
    assert storage.list_dirs(f"{root}/nothing") == []


def test_a_delete_can_be_conditional(place: Place) -> None:
    storage, root = place
    written = storage.write(f"{root}/gone", b"x")
    with pytest.raises(PreconditionFailedError):
        storage.delete(f"{root}/gone", if_generation_match=written.generation + 1)
    storage.delete(f"{root}/gone", if_generation_match=written.generation)
    assert storage.stat(f"{root}/gone") is None


def test_files_go_up_and_come_down_whole(place: Place, tmp_path: Path) -> None:
    storage, root = place
    (tmp_path / "up").write_bytes(b"payload" * 1000)
    info = storage.upload(tmp_path / "up", f"{root}/moved")
    storage.download(f"{root}/moved", tmp_path / "deep" / "down")
    assert (tmp_path / "deep" / "down").read_bytes() == b"payload" * 1000
    assert info.crc32c == crc32c(b"payload" * 1000)
    with pytest.raises(ObjectNotFoundError):
        storage.download(f"{root}/none", tmp_path / "other")


def test_a_copy_has_the_same_bytes(place: Place) -> None:
    storage, root = place
    source = storage.write(f"{root}/source", b"payload")
    assert storage.copy(f"{root}/source", f"{root}/target").crc32c == source.crc32c
    assert storage.read(f"{root}/target") == b"payload"


def test_a_copy_has_conditions_on_both_ends(place: Place) -> None:
    storage, root = place
    first = storage.write(f"{root}/source", b"1")
    copied = storage.copy(f"{root}/source", f"{root}/target", source_generation=first.generation)
    second = storage.write(f"{root}/source", b"2")
    with pytest.raises(ObjectNotFoundError, match="source"):
        storage.copy(f"{root}/source", f"{root}/target", source_generation=first.generation)
    with pytest.raises(PreconditionFailedError, match="target"):
        storage.copy(f"{root}/source", f"{root}/target", if_generation_match=0)
    assert storage.read(f"{root}/target", generation=copied.generation) == b"1"
    storage.copy(
        f"{root}/source",
        f"{root}/target",
        source_generation=second.generation,
        if_generation_match=copied.generation,
    )
    assert storage.read(f"{root}/target") == b"2"


def test_a_file_goes_up_only_where_nothing_stands(place: Place, tmp_path: Path) -> None:
    storage, root = place
    (tmp_path / "up").write_bytes(b"payload")
    storage.upload(tmp_path / "up", f"{root}/once", if_generation_match=0)
    (tmp_path / "up").write_bytes(b"another")
    with pytest.raises(PreconditionFailedError, match="once"):
        storage.upload(tmp_path / "up", f"{root}/once", if_generation_match=0)
    assert storage.read(f"{root}/once") == b"payload"


def test_a_copy_to_another_scheme_is_not_the_services(place: Place, tmp_path: Path) -> None:
    storage, root = place
    storage.write(f"{root}/source", b"payload")
    other = "gs://bucket/name" if root.startswith("file:") else (tmp_path / "target").as_uri()
    with pytest.raises(UnsupportedUriError):
        storage.copy(f"{root}/source", other)


def test_unwritten_temporaries_are_not_objects(tmp_path: Path) -> None:
    storage = FileStorage()
    storage.write((tmp_path / "a").as_uri(), b"x")
    (tmp_path / ".writing-left-by-a-crash").write_bytes(b"half")
    assert [info.uri for info in storage.list_objects(tmp_path.as_uri() + "/")] == [(tmp_path / "a").as_uri()]


@pytest.mark.parametrize("uri", ["s3://bucket/name", "/just/a/path", "gs:/missing-slash/x", ""])
def test_other_schemes_are_refused(uri: str) -> None:
    with pytest.raises(UnsupportedUriError, match="gs://BUCKET/NAME"):
        storage_for(uri)


def test_one_client_serves_all_uris_of_a_scheme() -> None:
    assert storage_for("file:///a") is storage_for("file:///b/c")


def test_a_server_error_names_the_uri(client: gcs.Client) -> None:
    with pytest.raises(StorageError, match="gs://no-such-bucket-here/x"):
        GcsStorage(client).read("gs://no-such-bucket-here/x")


@pytest.mark.parametrize(
    ("credentials", "endpoint"),
    [
        (UserCredentials(token=None), "http://127.0.0.1:1"),  # google.auth cannot refresh it
        (AnonymousCredentials(), "no-such-transport://127.0.0.1"),  # requests has no adapter for it
    ],
)
def test_what_goes_wrong_before_the_server_is_reached_is_a_storage_error(
    tmp_path: Path, credentials: Credentials, endpoint: str
) -> None:
    options = {"api_endpoint": endpoint}
    storage = GcsStorage(gcs.Client(project="demo", credentials=credentials, client_options=options))
    uri = "gs://bucket/name"
    (tmp_path / "up").write_bytes(b"x")
    for ask in (
        lambda: storage.read(uri),
        lambda: storage.write(uri, b"x"),
        lambda: storage.stat(uri),
        lambda: list(storage.list_objects(uri)),
        lambda: storage.list_dirs(uri),
        lambda: storage.delete(uri),
        lambda: storage.copy(uri, uri),
        lambda: storage.download(uri, tmp_path / "down"),
        lambda: storage.upload(tmp_path / "up", uri),
    ):
        with pytest.raises(StorageError, match=uri):
            ask()


def test_bytes_that_rotted_on_the_server_are_corrupt(
    client: gcs.Client, bucket: gcs.Bucket, payloads: Path, tmp_path: Path
) -> None:
    storage, uri, data = GcsStorage(client), f"gs://{bucket.name}/rotten", b"a payload of its own" * 99
    storage.write(uri, data)
    [payload] = [path for path in payloads.rglob("*") if path.is_file() and path.read_bytes() == data]
    payload.write_bytes(b"b" + data[1:])
    with pytest.raises(ObjectCorruptError, match=uri):
        storage.read(uri)
    with pytest.raises(ObjectCorruptError, match=uri):
        storage.download(uri, tmp_path / "down")


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """The kernel refuses to let this process's files grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_is_a_storage_error_and_nothing_is_left(tmp_path: Path) -> None:
    storage, uri = FileStorage(), (tmp_path / "big").as_uri()
    storage.write(uri, b"before")
    with full_disk(1 << 20), pytest.raises(StorageError, match=uri):
        storage.write(uri, bytes(2 << 20))
    assert storage.read(uri) == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_a_file_where_a_directory_is_needed_is_a_storage_error(tmp_path: Path) -> None:
    storage = FileStorage()
    storage.write((tmp_path / "file").as_uri(), b"x")
    uri = (tmp_path / "file" / "below").as_uri()
    assert storage.stat(uri) is None
    for ask in (
        lambda: storage.read(uri),
        lambda: storage.write(uri, b"x"),
        lambda: storage.delete(uri),
        lambda: storage.copy(uri, uri),
        lambda: storage.download(uri, tmp_path / "down"),
        lambda: storage.upload(tmp_path / "none", uri),
    ):
        with pytest.raises(StorageError, match=uri):
            ask()
