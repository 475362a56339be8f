"""What a checkpoint root on disk has that one in a bucket has not: temporary files, directories, other spellings."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from made_checkpoints import FIRST, SECOND, commit, own, save, write_object, write_objects
from penstock_trainer.checkpoint_root import CheckpointRoot, find_leftovers, remove_leftovers, verify
from penstock_trainer.contract.checkpoint import step_dir_uri

TOMORROW = time.time() + 36 * 3600.0


@pytest.fixture
def root(tmp_path: Path) -> CheckpointRoot:
    return CheckpointRoot((tmp_path / "root").as_uri())


def cut_off_while_writing(uri: str) -> None:
    """A process that ends, as if killed, between the bytes of a file and its name."""
    program = (
        "import os, sys; from penstock_trainer.storage import storage_for; os.fsync = lambda _: os._exit(9); "
        "storage_for(sys.argv[1]).write(sys.argv[1], b'half')"
    )
    assert subprocess.run([sys.executable, "-c", program, uri]).returncode == 9


@pytest.mark.parametrize(
    "name", ["owner.json", "step-00000010/aaaaaaaa/0-0.distcp", "step-00000010/manifest.json"]
)
def test_the_temporary_file_of_a_killed_writer_is_found_by_its_age_and_removed(
    root: CheckpointRoot, tmp_path: Path, name: str
) -> None:
    save(root, 10, attempt=SECOND)
    before = sorted(path for path in (tmp_path / "root").rglob("*") if path.is_file())
    cut_off_while_writing(f"{root.uri}/{name}")
    assert {one.kept for one in find_leftovers(root)} == {"it is younger than 24 h"}
    [left] = find_leftovers(root, now=TOMORROW)
    assert (left.kept, left.size) == ("", 4)
    assert remove_leftovers(root, [left]) == [left]
    assert sorted(path for path in (tmp_path / "root").rglob("*") if path.is_file()) == before


def test_a_temporary_file_of_the_owner_stays(root: CheckpointRoot) -> None:
    own(root, FIRST, 1)
    cut_off_while_writing(f"{root.uri}/step-00000010/{FIRST}/0-0.distcp")
    [left] = find_leftovers(root, now=TOMORROW)
    assert "owns the root" in left.kept


def test_directories_that_are_emptied_go_and_others_stay(root: CheckpointRoot, tmp_path: Path) -> None:
    write_objects(root, 10, FIRST)
    write_object(root, 20, f"{FIRST}/0-0.distcp", b"x")
    write_object(root, 20, "notes.txt", b"mine")
    (tmp_path / "root/step-00000030" / FIRST).mkdir(parents=True)
    remove_leftovers(root, find_leftovers(root, now=TOMORROW))
    left = [str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*")]
    assert sorted(left) == ["step-00000020", "step-00000020/notes.txt"]


def test_a_young_empty_directory_stays(root: CheckpointRoot, tmp_path: Path) -> None:
    (tmp_path / "root/step-00000030" / FIRST).mkdir(parents=True)
    [left] = find_leftovers(root)
    assert left.kept == "it is younger than 24 h"


def test_a_link_is_never_followed(root: CheckpointRoot, tmp_path: Path) -> None:
    save(root, 10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/0-0.distcp").write_bytes(b"theirs")
    (tmp_path / "root/step-00000010/linked").symlink_to(tmp_path / "elsewhere")
    assert [one.kept for one in find_leftovers(root, now=TOMORROW)] == ["it is not of the checkpoint layout"]


def test_a_root_whose_uri_is_not_quoted_is_the_same_root(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}/a root = here")
    manifest = save(root, 10)
    write_objects(root, 20, FIRST)
    assert root.whole(10) == manifest
    assert len(remove_leftovers(root, find_leftovers(root, now=TOMORROW))) == 3
    assert root.steps() == [10]


def test_verify_holds_a_few_pieces_of_an_object_in_memory_and_not_the_object(root: CheckpointRoot) -> None:
    objects = write_objects(root, 10, FIRST)
    path = Path(step_dir_uri(root.uri, 10).removeprefix("file://")) / FIRST / "9-0.distcp"
    big = write_object(root, 10, f"{FIRST}/9-0.distcp", b"\0" * (96 << 20))
    commit(root, 10, (big, *objects), attempt=FIRST)
    tracemalloc.start()
    try:
        assert verify(root, 10) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20  # one object in pieces of 16 MiB, the next read before the last is let go
    assert path.exists()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_attempts_have_left_gc_keeps_every_checkpoint_and_what_the_owner_may_still_commit(
    root: CheckpointRoot, tmp_path: Path, seed: int
) -> None:
    """Saves in any order by any attempt, cut off before the manifest or damaged after it."""
    draw = random.Random(seed)
    owner = draw.choice([FIRST, SECOND, "cccccccc"])
    own(root, owner, 3)
    pending = {}
    for _ in range(12):
        step, attempt = draw.choice([10, 20, 30]), draw.choice([FIRST, SECOND, "cccccccc"])
        objects = write_objects(root, step, attempt)
        pending.pop((step, attempt), None)
        if draw.random() < 0.5:
            commit(root, step, objects, attempt=attempt)
        elif attempt == owner:
            pending[step, attempt] = objects
        if draw.random() < 0.1:
            (tmp_path / "root" / f"step-{step:08d}/manifest.json").write_bytes(b"?")
    before = {step: root.state(step) for step in root.steps()}
    remove_leftovers(root, find_leftovers(root, now=TOMORROW))
    assert {step: root.state(step) for step in root.steps()} == {
        step: state for step, state in before.items() if step in root.steps()
    }
    assert {step for step, state in before.items() if state.condition != "not committed"} <= set(root.steps())
    for (step, attempt), objects in pending.items():
        commit(root, step, objects, attempt=attempt)
        assert verify(root, step) == []
