"""The store by itself: conditions, generations, listings, and what a crash leaves."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import pytest

from penstock_local.storage import Attributes, ObjectStore, Preconditions
from penstock_local.storage.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    BucketNotFoundError,
    ChecksumMismatchError,
    InvalidRequestError,
    NotModifiedError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    UnsupportedError,
)
from penstock_local.storage.store import Source

NEW = Preconditions(if_generation_match=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path)
    store.create_bucket("bkt")
    yield store
    store.close()


def names(store: ObjectStore, **query: object) -> list[str]:
    return [found.name for found in store.list("bkt", **query).objects]  # type: ignore[arg-type]  # any of its arguments


def payloads(root: Path) -> list[Path]:
    return list((root / "blobs").iterdir())


def test_an_object_carries_size_and_hashes_of_its_content(store: ObjectStore) -> None:
    data = b"penstock" * 1000
    written = store.put("bkt", "x", data, content_type="text/plain", metadata={"k": "v"})
    assert written.size == len(data)
    assert written.crc32c == base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    assert written.md5 == base64.b64encode(hashlib.md5(data).digest()).decode()
    assert (written.content_type, written.metadata, written.metageneration) == ("text/plain", {"k": "v"}, 1)
    assert store.get("bkt", "x") == written
    assert store.read("bkt", "x") == data


def test_a_file_is_stored_to_its_end(store: ObjectStore) -> None:
    data = bytes(3 << 20)
    store.put("bkt", "zeros", io.BytesIO(data))
    assert store.read("bkt", "zeros") == data


def test_an_overwrite_makes_a_later_generation_and_the_old_one_is_gone(
    store: ObjectStore, tmp_path: Path
) -> None:
    old = store.put("bkt", "x", b"old")
    new = store.put("bkt", "x", b"new")
    assert new.generation > old.generation
    with pytest.raises(ObjectNotFoundError, match="there is no versioning"):
        store.get("bkt", "x", generation=old.generation)
    assert store.read("bkt", "x", generation=new.generation) == b"new"
    assert len(payloads(tmp_path)) == 1


def test_a_reader_keeps_what_it_opened_when_the_object_is_overwritten(store: ObjectStore) -> None:
    store.put("bkt", "x", b"old")
    found, file = store.open("bkt", "x")
    store.put("bkt", "x", b"newer")
    with file:
        assert (file.read(), found.size) == (b"old", 3)


def test_generations_rise_after_a_reopen_even_when_the_clock_stepped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(tmp_path)
    store.create_bucket("bkt")
    generations = [store.put("bkt", "x", b"").generation for _ in range(20)]
    store.delete("bkt", "x")
    store.close()
    monkeypatch.setattr("penstock_local.storage.store.time.time_ns", lambda: 1_000_000_000)
    store = ObjectStore(tmp_path)
    generations.append(store.put("bkt", "x", b"").generation)
    store.close()
    assert generations == sorted(set(generations))


def test_objects_and_policies_survive_a_reopen(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    store.create_bucket("bkt", labels={"team": "a"})
    store.set_iam_policy("bkt", {"bindings": [{"role": "r", "members": ["m"]}]})
    written = store.put("bkt", "a/ü", b"data", metadata={"k": "ü"})
    store.close()
    store = ObjectStore(tmp_path)
    assert store.get("bkt", "a/ü") == written
    assert store.read("bkt", "a/ü") == b"data"
    assert store.get_bucket("bkt").labels == {"team": "a"}
    assert store.iam_policy("bkt")["bindings"][0]["role"] == "r"
    store.close()


def test_payloads_that_a_crash_left_behind_go_when_the_store_opens(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    store.create_bucket("bkt")
    store.put("bkt", "kept", b"kept")
    store.stage().write(b"cut off")  # a process that dies here neither commits nor discards
    store.close()
    assert len(payloads(tmp_path)) == 2
    store = ObjectStore(tmp_path)
    assert len(payloads(tmp_path)) == 1
    assert store.read("bkt", "kept") == b"kept"
    store.close()


@pytest.mark.parametrize(
    ("preconditions", "holds"),
    [
        (Preconditions(), True),
        (Preconditions(if_generation_match=0), False),
        (Preconditions(if_generation_match=7), False),
        (Preconditions(if_generation_not_match=7), True),
        (Preconditions(if_generation_not_match=0), True),
        (Preconditions(if_metageneration_match=1), True),
        (Preconditions(if_metageneration_match=2), False),
        (Preconditions(if_metageneration_not_match=1), False),
    ],
)
def test_a_write_over_an_object_keeps_its_conditions(
    store: ObjectStore, preconditions: Preconditions, holds: bool
) -> None:
    store.put("bkt", "x", b"old")
    try:
        store.put("bkt", "x", b"new", preconditions=preconditions)
        written = True
    except PreconditionFailedError:
        written = False
    assert written is holds
    assert store.read("bkt", "x") == (b"new" if holds else b"old")


def test_a_condition_on_the_live_generation_holds_once(store: ObjectStore) -> None:
    seen = Preconditions(if_generation_match=store.put("bkt", "x", b"0").generation)
    store.put("bkt", "x", b"1", preconditions=seen)
    with pytest.raises(PreconditionFailedError, match="ifGenerationMatch"):
        store.put("bkt", "x", b"2", preconditions=seen)
    with pytest.raises(PreconditionFailedError):
        store.delete("bkt", "x", preconditions=seen)
    assert store.read("bkt", "x") == b"1"


@pytest.mark.parametrize(
    "preconditions", [Preconditions(if_generation_match=5), Preconditions(if_generation_not_match=0)]
)
def test_a_condition_that_needs_an_object_fails_without_one(
    store: ObjectStore, preconditions: Preconditions, tmp_path: Path
) -> None:
    with pytest.raises(PreconditionFailedError):
        store.put("bkt", "x", b"data", preconditions=preconditions)
    assert payloads(tmp_path) == []


def test_a_read_whose_not_match_condition_fails_is_not_modified(store: ObjectStore) -> None:
    generation = store.put("bkt", "x", b"").generation
    with pytest.raises(NotModifiedError):
        store.get("bkt", "x", preconditions=Preconditions(if_generation_not_match=generation))
    with pytest.raises(PreconditionFailedError):
        store.get("bkt", "x", preconditions=NEW)


def test_of_concurrent_conditional_creates_exactly_one_wins(store: ObjectStore, tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def create(writer: int) -> int | None:
        start.wait()
        try:
            store.put("bkt", "owner", str(writer).encode(), preconditions=NEW)
        except PreconditionFailedError:
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        winners = [writer for writer in pool.map(create, range(8)) if writer is not None]
    assert len(winners) == 1
    assert store.read("bkt", "owner") == str(winners[0]).encode()
    assert len(payloads(tmp_path)) == 1


def test_concurrent_conditional_increments_lose_none(store: ObjectStore) -> None:
    store.put("bkt", "counter", b"0")

    def increment(_: int) -> None:
        while True:
            found, file = store.open("bkt", "counter")
            with file:
                value = int(file.read())
            try:
                seen = Preconditions(if_generation_match=found.generation)
                store.put("bkt", "counter", str(value + 1).encode(), preconditions=seen)
            except PreconditionFailedError:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(20)))
    assert store.read("bkt", "counter") == b"20"


@pytest.mark.parametrize(
    "name", ["a", "a/b", "a//b", "/a", "a/", "../x", "ü", "\0", "x" * 1024, "é" * 512, "a?b#c%2F"]
)
def test_any_name_that_cloud_storage_takes_is_its_own_object(
    store: ObjectStore, name: str, tmp_path: Path
) -> None:
    store.put("bkt", "a", b"another")
    store.put("bkt", name, name.encode())
    assert store.read("bkt", name) == name.encode()
    assert name in names(store)
    assert all(path.parent == tmp_path / "blobs" for path in payloads(tmp_path))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a\nb", "a\rb", "x" * 1025, "é" * 513, ".well-known/acme-challenge/x"]
)
def test_a_name_that_cloud_storage_refuses_is_refused(store: ObjectStore, name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid object name"):
        store.put("bkt", name, b"data")
    assert payloads(tmp_path) == []


@pytest.mark.parametrize("name", ["", "ab", "Upper", "-a-", "a b", "a/b", "192.168.0.1", "x" * 64, "bucket."])
def test_a_bucket_name_that_cloud_storage_refuses_is_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid bucket name"):
        store.create_bucket(name)


def test_bytes_that_do_not_hash_to_what_was_announced_are_not_stored(
    store: ObjectStore, tmp_path: Path
) -> None:
    for algorithm in ("crc32c", "md5"):
        staged = store.stage()
        staged.write(b"damaged")
        with pytest.raises(ChecksumMismatchError, match=algorithm):
            store.commit(staged, "bkt", "x", attributes=Attributes(), expected=((algorithm, "AAAAAA=="),))
    assert (names(store), payloads(tmp_path)) == ([], [])


def test_listing_is_in_the_order_of_utf8_bytes(store: ObjectStore) -> None:
    given = ["b", "a/b", "a", "a0", "ü", "Z", "￿", "\U0001f600"]
    for name in given:
        store.put("bkt", name, b"")
    assert names(store) == sorted(given, key=str.encode)


@pytest.fixture
def tree(store: ObjectStore) -> ObjectStore:
    for name in ("a.txt", "run/", "run/1/x", "run/1/y", "run/2/x", "run/3", "run0", "z/1/2"):
        store.put("bkt", name, b"")
    return store


def test_a_delimiter_folds_names_into_prefixes(tree: ObjectStore) -> None:
    top = tree.list("bkt", delimiter="/")
    assert [found.name for found in top.objects] == ["a.txt", "run0"]
    assert list(top.prefixes) == ["run/", "z/"]
    below = tree.list("bkt", prefix="run/", delimiter="/")
    assert [found.name for found in below.objects] == ["run/", "run/3"]
    assert list(below.prefixes) == ["run/1/", "run/2/"]
    with_folder = tree.list("bkt", delimiter="/", include_trailing_delimiter=True)
    assert [found.name for found in with_folder.objects] == ["a.txt", "run/", "run0"]


@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("max_results", [1, 2, 3, 100])
def test_pages_together_are_the_whole_listing(tree: ObjectStore, delimiter: str, max_results: int) -> None:
    whole = tree.list("bkt", delimiter=delimiter)
    objects, prefixes, token, pages = [], [], "", 0
    while pages == 0 or token:
        page = tree.list("bkt", delimiter=delimiter, max_results=max_results, page_token=token)
        assert 1 <= len(page.objects) + len(page.prefixes) <= max_results
        objects += page.objects
        prefixes += page.prefixes
        token, pages = page.next_page_token, pages + 1
    assert (objects, prefixes) == (list(whole.objects), list(whole.prefixes))
    assert pages == -(-(len(whole.objects) + len(whole.prefixes)) // max_results)


def test_offsets_bound_a_listing_from_inclusive_to_exclusive(tree: ObjectStore) -> None:
    assert names(tree, start_offset="run/1/y", end_offset="run0") == ["run/1/y", "run/2/x", "run/3"]
    assert names(tree, prefix="run/", start_offset="a") == ["run/", "run/1/x", "run/1/y", "run/2/x", "run/3"]
    assert names(tree, prefix="run/", end_offset="a") == []


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("run/*/x", ["run/1/x", "run/2/x"]),
        ("**x", ["run/1/x", "run/2/x"]),
        ("run*", ["run0"]),
        ("run/?", ["run/3"]),
        ("run/[12]/x", ["run/1/x", "run/2/x"]),
        ("run/[!2]/x", ["run/1/x"]),
        ("{a.txt,run/{2,3}*}", ["a.txt", "run/3"]),
        ("a\\.txt", ["a.txt"]),
        ("a,t", []),
    ],
)
def test_a_glob_selects_names(tree: ObjectStore, glob: str, expected: list[str]) -> None:
    assert names(tree, match_glob=glob) == expected


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"match_glob": "a["}, InvalidRequestError),
        ({"match_glob": "{a"}, InvalidRequestError),
        ({"match_glob": "[z-a]"}, InvalidRequestError),
        ({"match_glob": "a", "delimiter": "/"}, UnsupportedError),
        ({"max_results": 0}, InvalidRequestError),
        ({"page_token": "?"}, InvalidRequestError),
    ],
)
def test_a_listing_that_cannot_be_meant_is_refused(
    store: ObjectStore, query: dict[str, object], error: type[StorageError]
) -> None:
    with pytest.raises(error):
        names(store, **query)


def test_a_copy_has_the_content_and_its_own_generation(store: ObjectStore) -> None:
    store.create_bucket("other")
    source = store.put("bkt", "x", b"data", metadata={"k": "v"})
    copied = store.copy("bkt", Source(name="x"), "other", "y")
    assert (copied.crc32c, copied.md5, copied.metadata) == (source.crc32c, source.md5, {"k": "v"})
    assert copied.generation > source.generation
    store.delete("bkt", "x")
    assert store.read("other", "y") == b"data"


def test_an_object_can_be_copied_onto_itself_with_other_attributes(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put("bkt", "x", b"data")
    copied = store.copy("bkt", Source(name="x"), "bkt", "x", attributes=Attributes(content_type="text/plain"))
    assert (store.read("bkt", "x"), copied.content_type) == (b"data", "text/plain")
    assert len(payloads(tmp_path)) == 1


def test_a_copy_keeps_the_conditions_of_both_ends(store: ObjectStore, tmp_path: Path) -> None:
    store.put("bkt", "x", b"data")
    store.put("bkt", "y", b"there")
    with pytest.raises(PreconditionFailedError):
        store.copy("bkt", Source(name="x"), "bkt", "y", preconditions=NEW)
    stale = Source(name="x", preconditions=Preconditions(if_generation_match=1))
    with pytest.raises(PreconditionFailedError):
        store.copy("bkt", stale, "bkt", "z")
    assert store.read("bkt", "y") == b"there"
    assert len(payloads(tmp_path)) == 2


def test_compose_joins_objects_and_has_no_md5(store: ObjectStore) -> None:
    store.put("bkt", "a", b"one")
    store.put("bkt", "b", b"two")
    sources = [Source(name="a"), Source(name="b"), Source(name="a")]
    composed = store.compose("bkt", sources, "ab", attributes=Attributes())
    assert store.read("bkt", "ab") == b"onetwoone"
    assert composed.crc32c == base64.b64encode(google_crc32c.value(b"onetwoone").to_bytes(4, "big")).decode()
    assert (composed.md5, composed.component_count) == (None, 3)
    again = store.compose("bkt", [Source(name="ab"), Source(name="a")], "a", attributes=Attributes())
    assert (store.read("bkt", "a"), again.component_count) == (b"onetwooneone", 4)


def test_compose_with_a_stale_or_missing_source_stores_nothing(store: ObjectStore, tmp_path: Path) -> None:
    store.put("bkt", "a", b"one")
    stale = Source(name="a", preconditions=Preconditions(if_generation_match=1))
    for sources, error in (
        ([stale], PreconditionFailedError),
        ([Source(name="a"), Source(name="none")], ObjectNotFoundError),
        ([], InvalidRequestError),
        ([Source(name="a")] * 33, InvalidRequestError),
    ):
        with pytest.raises(error):
            store.compose("bkt", sources, "out", attributes=Attributes())
    assert names(store) == ["a"]
    assert len(payloads(tmp_path)) == 1


def test_an_update_keeps_the_generation_and_raises_the_metageneration(store: ObjectStore) -> None:
    before = store.put("bkt", "x", b"data")
    after = store.update("bkt", "x", lambda _old: Attributes(content_type="text/html"))
    assert (after.generation, after.metageneration) == (before.generation, 2)
    assert (after.content_type, after.updated > before.updated) == ("text/html", True)
    assert after.etag != before.etag
    with pytest.raises(PreconditionFailedError):
        store.update("bkt", "x", lambda old: old, preconditions=Preconditions(if_metageneration_match=1))


def test_only_an_empty_bucket_is_deleted(store: ObjectStore) -> None:
    store.put("bkt", "x", b"")
    with pytest.raises(BucketNotEmptyError):
        store.delete_bucket("bkt")
    store.delete("bkt", "x")
    store.delete_bucket("bkt")
    with pytest.raises(BucketNotFoundError):
        store.list("bkt")


def test_a_bucket_is_created_once(store: ObjectStore) -> None:
    with pytest.raises(BucketExistsError):
        store.create_bucket("bkt")
    store.create_bucket("second", location="europe-west4")
    assert [(bucket.name, bucket.location) for bucket in store.list_buckets()] == [
        ("bkt", "US-CENTRAL1"),
        ("second", "EUROPE-WEST4"),
    ]


def test_what_does_not_exist_is_not_found(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(BucketNotFoundError):
        store.put("none", "x", b"data")
    with pytest.raises(ObjectNotFoundError):
        store.delete("bkt", "x")
    with pytest.raises(ObjectNotFoundError):
        store.open("bkt", "x")
    assert payloads(tmp_path) == []


def test_importing_the_package_does_not_load_the_web_framework() -> None:
    code = "import sys, penstock_local.storage; sys.exit('starlette' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
