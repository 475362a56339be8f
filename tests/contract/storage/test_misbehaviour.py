"""What `GcsStorage` makes of a service and a network that fail, whichever way the bytes take."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage as gcs

from contract.storage.misbehaving import Kind, Misbehaving, misbehaving
from penstock_trainer.storage import (
    PIECE_BYTES,
    GcsStorage,
    ObjectCorruptError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    crc32c,
)

PAYLOAD = bytes(range(256)) * 4096
"""1 MiB: more than the buffers of sockets that a half of it could hide in."""
Make = Callable[..., GcsStorage]


@pytest.fixture(scope="module")
def server(endpoint: str) -> Iterator[Misbehaving]:
    with misbehaving(endpoint) as server:
        yield server


@pytest.fixture
def network(server: Misbehaving) -> Iterator[Misbehaving]:
    """Well-behaved until a test says otherwise."""
    server.requests.clear()
    server.agents.clear()
    yield server
    server.faults.clear()


@pytest.fixture(params=["session", "obstore"])
def make(request: pytest.FixtureRequest, network: Misbehaving) -> Iterator[Make]:
    """A storage behind that network; every payload goes the same way on its first try."""
    options = {"api_endpoint": network.url}
    client = gcs.Client(project="demo", credentials=AnonymousCredentials(), client_options=options)
    obstore_bytes = 0 if request.param == "obstore" else None
    yield lambda deadline_seconds=8.0: GcsStorage(
        client, deadline_seconds=deadline_seconds, obstore_bytes=obstore_bytes
    )
    client.close()


@pytest.fixture
def uri(bucket: gcs.Bucket) -> str:
    return f"gs://{bucket.name}/run/object"


def test_each_way_is_the_one_that_was_asked_for(
    make: Make, network: Misbehaving, uri: str, request: pytest.FixtureRequest
) -> None:
    make().write(uri, PAYLOAD)
    assert ("object_store" in network.agents[0]) == ("obstore" in request.node.callspec.id)
    assert network.requests[0].startswith("PUT ")


@pytest.mark.parametrize("status", [408, 429, 503])
def test_bursts_of_refusals_are_waited_out(make: Make, network: Misbehaving, uri: str, status: int) -> None:
    storage = make()
    network.spoil("refuse", "PUT", status=status, times=2, headers={"retry-after": "1"})
    network.spoil("refuse", "GET", status=status, times=2)
    written = storage.write(uri, PAYLOAD)
    assert storage.read(uri, generation=written.generation) == PAYLOAD


@pytest.mark.parametrize("kind", ["reset", "lose answer", "flip"])
@pytest.mark.parametrize("condition", [None, 0])
def test_a_write_that_was_cut_off_or_changed_is_sent_again(
    make: Make, network: Misbehaving, uri: str, kind: Kind, condition: int | None
) -> None:
    storage = make()
    network.spoil(kind, "PUT", times=2)
    written = storage.write(uri, memoryview(PAYLOAD), if_generation_match=condition)
    assert storage.stat(uri) == written
    assert (storage.read(uri), written.crc32c) == (PAYLOAD, crc32c(PAYLOAD))


@pytest.mark.parametrize("kind", ["truncate", "reset answer"])
def test_an_answer_that_was_cut_off_is_read_again(
    make: Make, network: Misbehaving, uri: str, kind: Kind
) -> None:
    storage = make()
    storage.write(uri, PAYLOAD)
    network.spoil(kind, "GET", times=2)
    assert storage.read(uri) == PAYLOAD
    network.spoil(kind, "GET", times=2)
    assert storage.read(uri, start=5, length=700_000) == PAYLOAD[5:700_005]


def test_a_whole_object_that_arrives_changed_is_read_again(
    make: Make, network: Misbehaving, uri: str
) -> None:
    storage = make()
    storage.write(uri, PAYLOAD)
    network.spoil("flip answer", "GET", times=2)
    assert storage.read(uri) == PAYLOAD
    network.spoil("flip answer", "GET", times=3)
    with pytest.raises(ObjectCorruptError, match=uri):
        storage.read(uri)


def test_bytes_that_are_changed_each_time_leave_no_object(make: Make, network: Misbehaving, uri: str) -> None:
    storage = make()
    network.spoil("flip", "PUT", times=3)
    with pytest.raises(ObjectCorruptError, match=f"{uri}.*3 times"):
        storage.write(uri, PAYLOAD)
    assert storage.stat(uri) is None
    assert len([line for line in network.requests if line.startswith("PUT")]) == 3


def test_bytes_other_than_the_caller_hashed_are_never_an_object(make: Make, uri: str) -> None:
    storage = make()
    with pytest.raises(ObjectCorruptError, match=uri):
        storage.write(uri, PAYLOAD, known_crc32c=crc32c(b"other"))
    assert storage.stat(uri) is None
    assert storage.write(uri, PAYLOAD, known_crc32c=crc32c(PAYLOAD)) == storage.stat(uri)


def test_slow_answers_are_waited_for(make: Make, network: Misbehaving, uri: str) -> None:
    storage = make()
    network.spoil("slow", "PUT", seconds=0.5)
    network.spoil("slow", "GET", seconds=0.5)
    storage.write(uri, PAYLOAD)
    assert storage.read(uri) == PAYLOAD
    assert len([line for line in network.requests if line.startswith("PUT")]) == 1


@pytest.mark.parametrize(
    ("kind", "how"), [("refuse", {}), ("reset", {}), ("lose answer", {}), ("slow", {"seconds": 1.0})]
)
def test_a_service_that_stays_away_is_unavailable_by_the_deadline(
    make: Make, network: Misbehaving, uri: str, kind: Kind, how: dict[str, float]
) -> None:
    storage = make(deadline_seconds=0.5)
    for method in ("PUT", "GET", "POST", "DELETE"):
        network.spoil(kind, method, times=0, **how)
    for ask in (
        lambda: storage.write(uri, PAYLOAD),
        lambda: storage.read(uri),
        *([lambda: storage.delete(uri), lambda: storage.copy(uri, f"{uri}-2")] if kind == "refuse" else []),
    ):
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=uri):
            ask()
        # The last try may begin just before the deadline, and takes as long as nothing may move: the deadline again.
        assert time.monotonic() - begun < 5.0


def test_what_is_not_permitted_is_said_at_once(make: Make, network: Misbehaving, uri: str) -> None:
    storage = make()
    for method in ("PUT", "GET", "POST", "DELETE"):
        network.spoil("refuse", method, status=403, times=0)
    for ask, permission in (
        (lambda: storage.write(uri, PAYLOAD), "storage.objects.create"),
        (lambda: storage.read(uri), "storage.objects.get"),
        (lambda: storage.stat(uri), "storage.objects.get"),
        (lambda: list(storage.list_objects(uri)), "storage.objects.list"),
        (lambda: storage.delete(uri), "storage.objects.delete"),
        (lambda: storage.copy(uri, f"{uri}-2"), "storage.objects.get on the source"),
    ):
        with pytest.raises(StorageError, match=f"{uri}.*{permission}") as caught:
            ask()
        assert not isinstance(caught.value, StorageUnavailableError)
    # obstore does not tell what it was refused for: the session asks again, once.
    assert len([line for line in network.requests if line.startswith("PUT")]) <= 2


def test_credentials_that_are_refused_are_named_as_the_reason(
    make: Make, network: Misbehaving, uri: str
) -> None:
    network.spoil("refuse", "PUT", status=401, times=0)
    with pytest.raises(StorageError, match=f"{uri}.*the credentials do not work") as caught:
        make().write(uri, PAYLOAD)
    assert not isinstance(caught.value, StorageUnavailableError)


def test_a_bucket_that_does_not_exist_is_named_as_the_reason(make: Make, tmp_path: Path) -> None:
    storage, uri = make(), "gs://no-such-bucket-here/name"
    (tmp_path / "up").write_bytes(PAYLOAD)
    for ask in (
        lambda: storage.write(uri, PAYLOAD),
        lambda: storage.read(uri),
        lambda: storage.stat(uri),
        lambda: list(storage.list_objects(uri)),
        lambda: storage.list_dirs(uri),
        lambda: storage.upload(tmp_path / "up", uri),
        lambda: storage.download(uri, tmp_path / "down"),
    ):
        with pytest.raises(StorageError, match=f"{uri}.*bucket does not exist") as caught:
            ask()
        assert not isinstance(caught.value, ObjectNotFoundError)


@pytest.mark.parametrize("name", ["a//b", "/a", "a/../b", "a/./b", "ü x+y%2F?#&", "a\\b", "*"])
def test_names_are_kept_as_they_are(make: Make, bucket: gcs.Bucket, name: str) -> None:
    storage, uri = make(), f"gs://{bucket.name}/{name}"
    storage.write(uri, PAYLOAD)
    assert storage.read(uri, length=10) == PAYLOAD[:10]
    assert [info.uri for info in storage.list_objects(f"gs://{bucket.name}/")] == [uri]


def test_conditions_hold_on_every_way(make: Make, uri: str) -> None:
    storage = make()
    first = storage.write(uri, b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailedError, match=str(first.generation)):
        storage.write(uri, b"2", if_generation_match=0)
    second = storage.write(uri, b"2", if_generation_match=first.generation)
    with pytest.raises(PreconditionFailedError):
        storage.write(uri, b"3", if_generation_match=first.generation)
    assert storage.stat(uri) == second


def test_no_upload_from_memory_copies_its_buffer_or_leaves_a_session(
    make: Make, network: Misbehaving, uri: str
) -> None:
    storage, data = make(), memoryview(bytearray(32 << 20))
    storage.write(uri, b"")  # what is made once is not counted
    tracemalloc.start()
    storage.write(uri, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The server in front runs in this process, and holds the body three times. A copy of ours would be the fourth.
    assert peak < 3.5 * len(data)
    assert not [line for line in network.requests if "upload" in line]


def test_a_rewrite_goes_on_until_it_is_done(make: Make, network: Misbehaving, uri: str) -> None:
    storage = make()
    source = storage.write(uri, b"payload")
    network.spoil("part of a rewrite", "POST", times=2)
    copied = storage.copy(uri, f"{uri}-2", source_generation=source.generation, if_generation_match=0)
    assert (copied.crc32c, copied.size) == (source.crc32c, 7)
    calls = [line for line in network.requests if "rewriteTo" in line]
    assert ["rewriteToken=go-on" in line for line in calls] == [False, True, True]
    assert all(f"sourceGeneration={source.generation}" in line for line in calls)
    assert not [
        line for line in network.requests if line.startswith("GET /b-")
    ]  # no payload passes through here


def test_a_copy_is_of_the_generation_that_was_named(make: Make, uri: str) -> None:
    storage = make()
    first = storage.write(uri, b"1")
    storage.write(uri, b"2")
    with pytest.raises(ObjectNotFoundError, match=uri):
        storage.copy(uri, f"{uri}-2", source_generation=first.generation)
    assert storage.stat(f"{uri}-2") is None


def test_a_copy_whose_answer_was_lost_finds_its_own_bytes(make: Make, network: Misbehaving, uri: str) -> None:
    storage = make()
    storage.write(uri, b"payload")
    network.spoil("lose answer", "POST")
    copied = storage.copy(uri, f"{uri}-2", if_generation_match=0)
    assert storage.stat(f"{uri}-2") == copied
    storage.write(f"{uri}-3", b"another's")
    with pytest.raises(PreconditionFailedError, match=f"{uri}-3"):
        storage.copy(uri, f"{uri}-3", if_generation_match=0)


@pytest.mark.parametrize("size", [100, PIECE_BYTES + 5])
def test_files_that_arrive_changed_are_sent_and_read_again(
    make: Make, network: Misbehaving, uri: str, tmp_path: Path, size: int
) -> None:
    storage, data = make(), (PAYLOAD * 17)[:size]
    (tmp_path / "up").write_bytes(data)
    network.spoil("flip", "PUT")
    info = storage.upload(tmp_path / "up", uri, if_generation_match=0)
    assert info == storage.stat(uri)
    assert info.crc32c == crc32c(data)
    with pytest.raises(PreconditionFailedError):
        storage.write(uri, b"other", if_generation_match=0)
    network.spoil("truncate", "GET")
    storage.download(uri, tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_a_file_that_cannot_be_downloaded_whole_is_not_left(
    make: Make, network: Misbehaving, uri: str, tmp_path: Path, bucket: gcs.Bucket, payloads: Path
) -> None:
    storage, data = make(deadline_seconds=2.0), b"bytes of this test" * 1000
    storage.write(uri, data)
    [stored] = [path for path in payloads.rglob("*") if path.is_file() and path.read_bytes() == data]
    stored.write_bytes(b"B" + data[1:])
    with pytest.raises(ObjectCorruptError, match=uri):
        storage.download(uri, tmp_path / "down")
    assert not (tmp_path / "down").exists()
