"""What one attempt writes, what it may not write any more, and what it deletes."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.contract.checkpoint import Best
from penstock_trainer.errors import FencedError
from penstock_trainer.storage import StorageError
from unit.penstock_trainer.checkpoints.one_buffer import (
    OBJECTS,
    TENSORS,
    Job,
    Watched,
    committed,
    manifest,
    require_whole,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def once(uri_end: str, operation: str, work: Callable[[], object]) -> Callable[[str, str], None]:
    """Does `work` before the first such operation, and nothing before others."""
    left = [work]

    def before(name: str, uri: str) -> None:
        if left and name == operation and uri.endswith(uri_end):
            left.pop()()

    return before


def test_every_checksum_of_manifest_and_index_is_that_of_the_bytes(root: Path) -> None:
    job = Job(root)
    job.save(8)
    found = manifest(root, 8)
    contents = {entry.name: (root / "step-00000008" / entry.name).read_bytes() for entry in found.objects}
    assert sorted(contents) == [
        f"{job.attempt}/{name}" for name in ("0-0.distcp", "0-1.distcp", "index.json")
    ]
    for entry in found.objects:
        data = contents[entry.name]
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert entry.crc32c == checksum(data)

    index = json.loads(contents[found.index])["tensors"]
    assert {name: (told["dtype"], tuple(told["shape"])) for name, told in index.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()
    }
    chunks = {
        (name, tuple(told["offsets"]), tuple(told["sizes"])): told
        for name, tensor in index.items()
        for told in tensor["chunks"]
    }
    for planned in OBJECTS:
        for chunk in planned.chunks:
            told = chunks.pop((chunk.fqn, chunk.offsets, chunk.sizes))
            data = contents[told["object"]][told["byte_offset"] :][: told["length"]]
            assert told["object"] == f"{job.attempt}/{planned.name}"
            assert (told["byte_offset"], told["length"]) == (chunk.begin - planned.begin, chunk.length)
            assert told["crc32c"] == checksum(data)
    assert chunks == {}


def checksum(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def test_a_writer_that_was_overtaken_stops_before_it_writes(root: Path) -> None:
    old = Job(root)
    old.save(4)
    new = Job(root)
    with pytest.raises(FencedError, match=rf"belongs to attempt {new.attempt} with fencing token 2"):
        old.save(8)
    assert not (root / "step-00000008").exists()
    new.save(8)
    require_whole(root, 8)


def test_a_writer_that_is_overtaken_while_it_writes_does_not_commit(root: Path) -> None:
    old = Job(root)
    receipt = old.write(8)
    Job(root)
    with pytest.raises(FencedError, match="must not write any more"):
        old.commit(8, receipt)
    assert committed(root) == []


def test_a_writer_that_is_overtaken_after_its_last_check_leaves_its_successors_manifest(root: Path) -> None:
    successors: list[Job] = []

    def overtake() -> None:
        successors.append(Job(root))
        successors[0].save(8)

    # The last thing before a manifest is published: all checks of the owner are done.
    old = Job(root, Watched(once("/manifest.json", "write", overtake)))
    with pytest.raises(FencedError, match="fencing token 2"):
        old.save(8)
    assert manifest(root, 8).attempt == successors[0].attempt
    require_whole(root, 8)


def test_a_manifest_of_a_higher_token_is_not_replaced_although_owner_json_was_removed(root: Path) -> None:
    Job(root)
    Job(root).save(8)
    (root / "owner.json").unlink()
    job = Job(root)
    with pytest.raises(FencedError, match=r"fencing token 2; this is attempt .* with token 1"):
        job.save(8)
    assert manifest(root, 8).fencing_token == 2
    require_whole(root, 8)


def test_at_whichever_operation_a_job_is_overtaken_nothing_interleaves(tmp_path: Path) -> None:
    """The successor does all of its work between two operations of the older job; once for every such place."""
    last_two = Retention(last=2, every=0, best=False)

    def overtaken_at(place: int, root: Path) -> bool:
        """Whether the older job had that many operations."""
        places, lock = iter(range(1000)), threading.Lock()
        successors: list[Job] = []

        def before(name: str, uri: str) -> None:
            with lock:
                if next(places) == place:
                    successors.append(Job(root, retention=last_two))
                    successors[0].save(8, 12)

        old = Job(root, Watched(before), retention=last_two)
        try:
            old.save(4, 8, 12)
        except FencedError:
            assert {manifest(root, step).fencing_token for step in (8, 12)} == {2}
        for step in committed(root):
            require_whole(root, step)
        assert committed(root)[-2:] == [8, 12]
        return bool(successors)

    count = 0
    while overtaken_at(count, tmp_path / str(count)):
        count += 1
    assert count > 24  # eight of each save, and the deletion of the first


def test_of_two_jobs_that_write_at_once_the_older_is_fenced_and_nothing_interleaves(root: Path) -> None:
    old, errors = Job(root), []
    has_begun = threading.Event()

    def save_on() -> None:
        try:
            for step in range(1, 200):
                old.save(step)
                has_begun.set()
        except FencedError as exc:
            errors.append(exc)

    thread = threading.Thread(target=save_on)
    thread.start()
    assert has_begun.wait(60)
    new = Job(root)
    first = max(committed(root)) + 1
    new.save(*range(first, first + 10))
    thread.join(60)

    assert len(errors) == 1
    # The one that was under way when the root was taken over may be either's, but whole.
    for step in committed(root):
        require_whole(root, step)
    assert {manifest(root, step).attempt for step in range(first + 1, first + 10)} == {new.attempt}
    assert max(committed(root)) == first + 9


def test_a_step_that_is_saved_again_after_a_roll_back_is_a_checkpoint_all_the_time(root: Path) -> None:
    states = []

    def look(name: str, uri: str) -> None:
        if committed(root):
            states.append(verify(CheckpointRoot(root.as_uri()), 8))

    job = Job(root, Watched(look))
    job.save(8)
    first = manifest(root, 8)
    states.clear()
    job.save(8, directory=f"{job.attempt}-1")
    assert states
    assert not any(states)
    assert manifest(root, 8).index == f"{job.attempt}-1/index.json" != first.index
    require_whole(root, 8)


def test_a_save_that_a_lost_writer_had_begun_is_written_over(root: Path) -> None:
    job = Job(root)
    job.write(8)
    job.save(8)
    job.save(8)  # lost after its commit, and before it could tell
    require_whole(root, 8)


def test_last_every_and_best_are_kept_and_the_rest_is_gone(root: Path) -> None:
    job = Job(root, retention=Retention(last=2, every=10, best=True))
    job.save(*range(1, 24), best=Best(step=7, value=1.0))
    assert committed(root) == [7, 10, 20, 22, 23]
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [
        f"step-{step:08d}" for step in (7, 10, 20, 22, 23)
    ]
    for step in committed(root):
        require_whole(root, step)

    job.save(24, best=Best(step=24, value=0.5))
    assert committed(root) == [10, 20, 23, 24]


def test_a_save_that_comes_does_not_wait_until_all_is_pruned(root: Path) -> None:
    Job(root).save(1, 2, 3, 4)
    job = Job(root, retention=Retention(last=2, every=0, best=False))
    job.commit(5, job.write(5))
    answers = iter([False, True])
    job.prune(is_asked=lambda: next(answers))
    assert committed(root) == [2, 3, 4, 5]
    job.prune()
    assert committed(root) == [4, 5]


def test_the_checkpoints_of_attempts_before_are_pruned_too(root: Path) -> None:
    Job(root).save(1, 2, 3)
    Job(root, retention=Retention(last=2, every=0, best=False)).save(4)
    assert committed(root) == [3, 4]


def test_a_manifest_is_deleted_before_its_objects(root: Path) -> None:
    deleted: list[str] = []

    def note(name: str, uri: str) -> None:
        if name == "delete":
            deleted.append(uri)

    job = Job(root, Watched(note), retention=Retention(last=2, every=0, best=False))
    job.save(1, 2, 3)
    assert deleted[0].endswith("step-00000001/manifest.json")
    assert sorted(deleted[1:]) == sorted(
        f"{root.as_uri()}/step-00000001/{job.attempt}/{name}"
        for name in ("0-0.distcp", "0-1.distcp", "index.json")
    )


@pytest.mark.parametrize("kept", ["step-00000001/manifest.json", "0-1.distcp"])
def test_what_cannot_be_deleted_is_logged_and_left_and_the_run_goes_on(
    root: Path, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    def refuse(name: str, uri: str) -> None:
        if name == "delete" and "step-00000001/" in uri and uri.endswith(kept):
            raise StorageError(f"{uri} is held by a retention policy until 2030.")

    job = Job(root, Watched(refuse), retention=Retention(last=2, every=0, best=False))
    with caplog.at_level(logging.WARNING):
        job.save(1, 2, 3, 4, 5)
    assert "an old checkpoint is left where it is" in caplog.text
    assert "is held by a retention policy until 2030." in caplog.text
    # It is in nobody's way: the others are still deleted.
    assert [step for step in committed(root) if step > 1] == [4, 5]
    require_whole(root, 5)
    assert any((root / "step-00000001").rglob("*1.distcp"))


def test_an_old_manifest_that_is_damaged_is_left_and_the_others_are_deleted(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(root, retention=Retention(last=2, every=0, best=False))
    job.save(1, 2)
    (root / "step-00000001/manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        job.save(3, 4)
    assert committed(root) == [1, 3, 4]
    assert "is not JSON" in caplog.text


def test_newer_steps_that_were_not_continued_from_are_neither_counted_nor_deleted_until_replaced(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Job(root)
    old.save(4, 8, 12)
    damaged = [root / f"step-{step:08d}/{old.attempt}/0-0.distcp" for step in (8, 12)]
    for path in damaged:
        path.write_bytes(b"")

    # It continues from step 4 and saves more often.
    new = Job(root, retention=Retention(last=2, every=0, best=False))
    new.save(6)
    assert committed(root) == [4, 6, 8, 12]
    assert all(path.exists() for path in damaged)
    with caplog.at_level(logging.WARNING):
        new.save(8)
    assert "which this run did not continue from" in caplog.text
    assert committed(root) == [6, 8, 12]
    require_whole(root, 8)
    new.save(10, 12)
    assert committed(root) == [10, 12]
    require_whole(root, 12)
