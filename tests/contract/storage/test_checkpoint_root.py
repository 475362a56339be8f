"""A checkpoint root on disk and in a bucket: judged, verified to the last byte, deleted, and cleaned of leftovers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage as gcs

from made_checkpoints import FIRST, SECOND, commit, own, save, write_object, write_objects
from penstock_trainer.checkpoint_root import (
    CheckpointRoot,
    Leftover,
    find_leftovers,
    read_index,
    remove_leftovers,
    verify,
)
from penstock_trainer.contract.checkpoint import Manifest, manifest_uri, owner_uri, step_dir_uri
from penstock_trainer.storage import (
    FileStorage,
    GcsStorage,
    ObjectCorruptError,
    ObjectNotFoundError,
    PreconditionFailedError,
    join,
)

TOMORROW = time.time() + 36 * 3600.0


@pytest.fixture(params=["file", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointRoot:
    """An empty one."""
    if request.param == "file":
        return CheckpointRoot((tmp_path / "a root").as_uri(), FileStorage())
    client: gcs.Client = request.getfixturevalue("client")
    bucket: gcs.Bucket = request.getfixturevalue("bucket")
    return CheckpointRoot(f"gs://{bucket.name}/a root", GcsStorage(client))


def uri(root: CheckpointRoot, step: int, name: str) -> str:
    return join(step_dir_uri(root.uri, step), name)


def everything(root: CheckpointRoot) -> dict[str, bytes]:
    return {info.uri: root.storage.read(info.uri) for info in root.storage.list_objects(root.uri + "/")}


def garbage(root: CheckpointRoot, **how: Any) -> list[str]:
    """Names below the root of what may go, a day and a half later."""
    found = find_leftovers(root, now=TOMORROW, **how)
    return [one.uri.removeprefix(root.uri + "/") for one in found if not one.kept]


def reasons(found: list[Leftover]) -> set[str]:
    return {one.kept for one in found}


def test_a_checkpoint_is_whole_until_an_object_of_it_is_gone_or_another(root: CheckpointRoot) -> None:
    manifest = save(root, 10)
    assert root.whole(10) == manifest
    assert root.state(10).condition == "whole"
    first, second = (uri(root, 10, entry.name) for entry in manifest.objects[:2])
    root.storage.delete(first)
    with pytest.raises(ObjectNotFoundError, match=r"0-0\.distcp is missing, but the manifest names it"):
        root.whole(10)
    root.storage.write(second, b"short")
    state = root.state(10)
    assert (state.condition, [finding.uri for finding in state.findings]) == ("damaged", [first, second])
    assert "size 5 instead of 2400" in state.findings[1].problem


def test_the_same_bytes_written_again_are_told_as_such(root: CheckpointRoot) -> None:
    entry = save(root, 10).objects[0]
    root.storage.write(uri(root, 10, entry.name), root.storage.read(uri(root, 10, entry.name)))
    told = "the same bytes, written again" if root.uri.startswith("gs") else "generation .* instead of"
    with pytest.raises(ObjectCorruptError, match=told):
        root.whole(10)


def test_a_step_without_a_manifest_is_not_committed_and_one_with_a_bad_manifest_is_damaged(
    root: CheckpointRoot,
) -> None:
    write_objects(root, 10, FIRST)
    save(root, 20)
    root.storage.write(manifest_uri(root.uri, 20), b"")
    root.storage.write(manifest_uri(root.uri, 30), save(root, 40).to_json().encode())
    conditions = {step: root.state(step).condition for step in root.steps()}
    assert conditions == {10: "not committed", 20: "damaged", 30: "damaged", 40: "whole"}
    assert "is that of step 40, in the directory of step 30" in root.state(30).findings[0].problem
    assert [manifest.step for manifest in root.whole_steps()] == [40]


def test_a_deleted_checkpoint_leaves_nothing_of_its_own(root: CheckpointRoot) -> None:
    manifest, kept = save(root, 10), save(root, 20)
    before = everything(root)
    root.delete(manifest)
    root.delete(manifest)  # gone already
    assert root.steps() == [20]
    assert everything(root) == {name: data for name, data in before.items() if "step-00000020" in name}
    assert root.whole(20) == kept


def test_a_checkpoint_that_a_newer_attempt_has_saved_again_is_not_deleted(root: CheckpointRoot) -> None:
    old = save(root, 10)
    newer = save(root, 10, attempt=SECOND, token=2)
    before = everything(root)
    with pytest.raises(PreconditionFailedError, match="by now the manifest of attempt bbbbbbbb"):
        root.delete(old)
    assert everything(root) == before
    assert root.whole(10) == newer


def test_an_object_that_was_written_again_since_survives_the_deletion(root: CheckpointRoot) -> None:
    manifest = save(root, 10)
    other = uri(root, 10, manifest.objects[0].name)
    root.storage.write(other, b"newer")
    root.delete(manifest)
    assert list(everything(root).values()) == [b"newer"]


def test_verify_finds_nothing_in_what_was_written(root: CheckpointRoot) -> None:
    manifest = save(root, 10)
    read: list[int] = []
    assert verify(root, 10, on_bytes=read.append) == []
    assert sum(read) == manifest.size


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda entry: replace(entry, sha256="0" * 64), "sha256"),
        (lambda entry: replace(entry, crc32c="AAAAAA=="), "crc32c"),
        (lambda entry: replace(entry, size=entry.size + 1), "size 2400 instead of 2401"),
        (lambda entry: replace(entry, generation=entry.generation + 1), "generation"),
        (lambda entry: replace(entry, name=f"{FIRST}/7-0.distcp"), "is missing"),
    ],
)
def test_verify_names_each_object_that_differs_and_what_differs(
    root: CheckpointRoot, change: Any, told: str
) -> None:
    objects = write_objects(root, 10, FIRST)
    commit(root, 10, (change(objects[0]), *objects[1:]), attempt=FIRST)
    findings = [finding for finding in verify(root, 10) if "index.json" not in finding.uri]
    [finding] = findings
    assert finding.uri == uri(root, 10, change(objects[0]).name)
    assert told in finding.problem


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("object", "aaaaaaaa/9-0.distcp", "lies in aaaaaaaa/9-0.distcp, which the manifest does not name"),
        ("object", "../../secret", "lies in ../../secret, which the manifest does not name"),
        ("byte_offset", 1201, "has bytes 1201 to 2401 of aaaaaaaa/0-0.distcp, which has 2400"),
        ("byte_offset", -1, "has bytes -1 to 1199"),
        ("length", 4, "a chunk of [100, 3] float32 has 4 bytes"),
        ("offsets", [150, 0], "a chunk of [100, 3] at [150, 0] is not inside of [200, 3]"),
        ("offsets", [0], "is not inside of"),
        ("sizes", [99, 3], "its chunks hold 597 elements of 600"),
    ],
)
def test_verify_finds_an_index_that_does_not_fit_its_objects(
    root: CheckpointRoot, field: str, value: Any, told: str
) -> None:
    objects = write_objects(root, 10, FIRST)
    index = json.loads(root.storage.read(uri(root, 10, objects[-1].name)))
    index["tensors"]["model.weight"]["chunks"][0][field] = value
    written = write_object(root, 10, objects[-1].name, json.dumps(index).encode())
    commit(root, 10, (*objects[:-1], written), attempt=FIRST)
    findings = verify(root, 10)
    assert {finding.uri for finding in findings} == {uri(root, 10, written.name)}
    assert told in " ".join(finding.problem for finding in findings)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b'{"tensors": {"t": {}}}',
        b'{"tensors": {"t": {"dtype": "eval", "shape": [], "chunks": []}}}',
    ],
)
def test_an_index_that_is_none_is_a_finding(root: CheckpointRoot, index: bytes) -> None:
    objects = write_objects(root, 10, FIRST)
    commit(root, 10, (*objects[:-1], write_object(root, 10, objects[-1].name, index)), attempt=FIRST)
    [finding] = verify(root, 10)
    assert finding.uri.endswith("index.json")


def test_the_index_tells_the_tensors(root: CheckpointRoot) -> None:
    tensors = read_index(root.storage, step_dir_uri(root.uri, 10), save(root, 10))
    assert [(each.name, each.shape, each.dtype, each.nbytes, len(each.chunks)) for each in tensors] == [
        ("model.weight", (200, 3), "float32", 2400, 2),
        ("opt.state.weight.exp_avg", (200, 3), "float32", 2400, 2),
    ]


def test_leftovers_are_what_no_manifest_names_and_nothing_else_is_removed(root: CheckpointRoot) -> None:
    save(root, 10)
    write_objects(root, 20, FIRST)
    save(root, 20, attempt=SECOND, token=2)
    own(root, "cccccccc", 3)
    root.storage.write(join(root.uri, "metrics/aaaaaaaa-00000001.jsonl"), b"{}")
    before = everything(root)
    write_objects(root, 30, FIRST)
    of_step_20 = [f"step-00000020/{FIRST}/{name}" for name in ("0-0.distcp", "1-0.distcp", "index.json")]
    of_step_30 = [name.replace("20/", "30/") for name in of_step_20]
    assert garbage(root) == of_step_20 + of_step_30
    removed = remove_leftovers(root, find_leftovers(root, now=TOMORROW))
    assert sorted(one.uri.removeprefix(root.uri + "/") for one in removed) == of_step_20 + of_step_30
    assert everything(root) == {
        name: data for name, data in before.items() if f"00000020/{FIRST}" not in name
    }
    assert root.steps() == [20, 10]
    assert [verify(root, step) for step in root.steps()] == [[], []]
    assert find_leftovers(root, now=TOMORROW) == []


def test_what_the_owner_has_written_stays_until_the_run_is_said_to_be_over(root: CheckpointRoot) -> None:
    write_objects(root, 10, FIRST)
    write_objects(root, 10, f"{SECOND}-2")
    own(root, SECOND, 2)
    assert all(FIRST in name for name in garbage(root))
    assert len(garbage(root)) == 3
    assert len(garbage(root, is_finished=True)) == 6
    assert "attempt bbbbbbbb owns the root and may be running" in reasons(find_leftovers(root, now=TOMORROW))


def test_an_owner_that_cannot_be_read_keeps_everything(root: CheckpointRoot) -> None:
    write_objects(root, 10, FIRST)
    root.storage.write(owner_uri(root.uri), b"?")
    assert garbage(root) == []


def test_what_is_young_stays(root: CheckpointRoot) -> None:
    write_objects(root, 10, FIRST)
    assert reasons(find_leftovers(root)) == {"it is younger than 24 h"}
    assert remove_leftovers(root, find_leftovers(root)) == []
    assert len(find_leftovers(root, min_age_seconds=0.0)) == 3
    assert reasons(find_leftovers(root, min_age_seconds=0.0)) == {""}


@pytest.mark.parametrize("manifest", [b"", b"{}", b'{"format_version": 99}'])
def test_a_step_whose_manifest_cannot_be_read_is_not_touched(root: CheckpointRoot, manifest: bytes) -> None:
    save(root, 10)
    root.storage.write(manifest_uri(root.uri, 10), manifest)
    found = find_leftovers(root, now=TOMORROW)
    assert len(found) == 3
    assert all("manifest cannot be read" in one.kept for one in found)
    before = everything(root)
    assert remove_leftovers(root, [replace(one, kept="") for one in found]) == []
    assert everything(root) == before


@pytest.mark.parametrize("name", ["notes.txt", "aaaaaaaa/notes.txt", "aaaaaaaa/deep/0.distcp", "0.distcp"])
def test_files_that_are_not_of_the_layout_stay(root: CheckpointRoot, name: str) -> None:
    save(root, 10)
    write_object(root, 10, name, b"mine")
    assert reasons(find_leftovers(root, now=TOMORROW)) == {"it is not of the checkpoint layout"}


def test_what_is_committed_or_written_again_after_the_listing_stays(root: CheckpointRoot) -> None:
    objects = write_objects(root, 10, FIRST)
    write_objects(root, 20, FIRST)
    found = find_leftovers(root, now=TOMORROW)
    assert not any(reasons(found))
    manifest = commit(root, 10, objects, attempt=FIRST)
    write_object(root, 20, f"{FIRST}/0-0.distcp", b"again")
    removed = remove_leftovers(root, found)
    assert {one.uri.rpartition("/")[2] for one in removed} == {"1-0.distcp", "index.json"}
    assert root.whole(10) == manifest
    assert root.storage.read(uri(root, 20, f"{FIRST}/0-0.distcp")) == b"again"


def test_objects_are_named_by_a_manifest_however_it_spells_them(root: CheckpointRoot) -> None:
    """`a//b` and `a/b` are one file on disk; what either may mean must not be taken for garbage."""
    objects = write_objects(root, 10, FIRST)
    spelled = tuple(replace(entry, name=entry.name.replace("/", "//")) for entry in objects)
    commit(root, 10, spelled, attempt=FIRST)
    assert garbage(root) == []


def test_objects_of_rank_files_of_format_1_are_of_the_layout(root: CheckpointRoot) -> None:
    write_object(root, 10, f"{FIRST}/0.distcp", b"x")
    assert garbage(root) == [f"step-00000010/{FIRST}/0.distcp"]


def test_a_manifest_read_back_is_the_manifest(root: CheckpointRoot) -> None:
    manifest = save(root, 10)
    assert root.manifest(10) == manifest == Manifest.from_json(manifest.to_json())
