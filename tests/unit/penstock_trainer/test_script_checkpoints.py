"""A script's checkpoint directory and its copy, on file://."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from penstock_trainer.contract.fields import FieldValueError
from penstock_trainer.contract.script_checkpoint import ScriptManifest, script_manifest_uri
from penstock_trainer.script_checkpoints import ScriptCheckpoints, SyncLoop
from penstock_trainer.storage import FileStorage, ObjectCorruptError, PreconditionFailedError, path_of


class Place:
    """A directory, its bucket, and what stands in both."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "checkpoints"
        self.uri = (root / "bucket").as_uri()
        self.node_uri = f"{self.uri}/node-1"

    def opened(self) -> ScriptCheckpoints:
        checkpoints = ScriptCheckpoints(self.directory, self.uri, 1)
        checkpoints.open()
        return checkpoints

    def write(self, name: str, text: str, *, age_seconds: float = 60.0) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        at = path.stat().st_mtime - age_seconds
        os.utime(path, (at, at))

    @property
    def files(self) -> dict[str, str]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {path.relative_to(self.directory).as_posix(): path.read_text() for path in paths}

    @property
    def manifest(self) -> ScriptManifest:
        return ScriptManifest.from_json(FileStorage().read(script_manifest_uri(self.node_uri)))

    @property
    def copy(self) -> dict[str, str]:
        storage = FileStorage()
        return {
            file.name: storage.read(f"{self.node_uri}/{file.object_name}").decode()
            for file in self.manifest.files
        }

    @property
    def objects(self) -> set[str]:
        return {path.name for path in path_of(f"{self.node_uri}/files").rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_directory_that_is_missing_or_empty_is_restored(place: Place) -> None:
    before = place.opened()
    place.write("step-2/model", "weights")
    place.write("empty", "")
    before.sync()
    for make_empty in (lambda: None, place.directory.mkdir):
        shutil.rmtree(place.directory)
        make_empty()
        place.opened()
        assert place.files == {"step-2/model": "weights", "empty": ""}
    assert [path.name for path in place.directory.parent.iterdir() if path.name.startswith(".")] == []


def test_a_directory_with_files_of_its_own_is_left_as_it_is(place: Place) -> None:
    before = place.opened()
    place.write("model", "old")
    before.sync()
    place.write("model", "newer")
    place.opened().sync()
    assert place.files == place.copy == {"model": "newer"}


def test_the_copy_follows_new_changed_and_deleted_files(place: Place) -> None:
    checkpoints = place.opened()
    place.write("a", "1")
    place.write("b", "1")
    checkpoints.sync()
    place.write("b", "2", age_seconds=30.0)
    place.write("c", "3")
    (place.directory / "a").unlink()
    checkpoints.sync()
    assert place.copy == {"b": "2", "c": "3"}
    assert place.objects == {"b", "c"}  # what no manifest names is gone


@pytest.mark.parametrize("age_seconds", [0.0, 60.0])
def test_what_is_in_storage_is_not_sent_again(place: Place, age_seconds: float) -> None:
    checkpoints = place.opened()
    place.write("model", "weights", age_seconds=age_seconds)
    checkpoints.sync()
    before = place.manifest
    checkpoints.sync()
    assert place.manifest == before
    # Neither by a launcher that has not seen the file yet, nor when only its time has changed.
    place.write("model", "weights", age_seconds=10.0)
    place.opened().sync()
    assert place.manifest.files == before.files


def test_a_young_file_that_changes_unnoticed_by_its_times_is_read_again(place: Place) -> None:
    checkpoints = place.opened()
    place.write("model", "one", age_seconds=0.0)
    times = (place.directory / "model").stat()
    checkpoints.sync()
    (place.directory / "model").write_text("two")
    os.utime(place.directory / "model", ns=(times.st_atime_ns, times.st_mtime_ns))
    checkpoints.sync()
    assert place.copy == {"model": "two"}


def test_a_file_that_changes_while_it_is_read_keeps_its_entry(place: Place) -> None:
    checkpoints = place.opened()
    place.write("model", "one")
    checkpoints.sync()
    place.write("model", "two", age_seconds=30.0)

    class Busy(FileStorage):
        """Storage that is slow enough for the script to write meanwhile."""

        def upload(self, path: Path, uri: str):  # type: ignore[no-untyped-def]
            info = super().upload(path, uri)
            place.write("model", "three", age_seconds=10.0)
            return info

    checkpoints._storage = Busy()
    checkpoints.sync()
    assert place.copy == {"model": "one"}
    assert len(place.objects) == 1
    checkpoints._storage = FileStorage()
    checkpoints.sync()
    assert place.copy == {"model": "three"}


def test_a_launcher_that_was_replaced_cannot_write_any_more(place: Place) -> None:
    before = place.opened()
    successor = place.opened()
    place.write("model", "weights")
    with pytest.raises(PreconditionFailedError):
        before.sync()
    successor.sync()
    assert place.copy == {"model": "weights"}


def test_a_corrupt_copy_is_refused_and_leaves_the_directory_missing(place: Place) -> None:
    checkpoints = place.opened()
    place.write("model", "weights")
    checkpoints.sync()
    [file] = place.manifest.files
    path_of(f"{place.node_uri}/{file.object_name}").write_text("weightz")
    shutil.rmtree(place.directory)
    with pytest.raises(ObjectCorruptError, match="expected 7 bytes with crc32c"):
        place.opened()
    assert not place.directory.exists()


def test_a_name_that_leads_out_of_the_directory_is_refused() -> None:
    text = (
        '{"format_version": 1, "writer": "a", "files": [{"name": "../model", "object_name": "files/a",'
        ' "generation": 1, "size": 1, "crc32c": ""}]}'
    )
    with pytest.raises(FieldValueError, match="a path under the directory"):
        ScriptManifest.from_json(text)


def test_the_loop_syncs_while_ranks_run_and_once_more_at_the_end(place: Place) -> None:
    loop = SyncLoop(place.opened(), 0.01)
    loop.start()
    place.write("model", "one")
    for _ in range(500):
        if place.manifest.files:
            break
        loop.join(0.01)
    assert place.copy == {"model": "one"}
    place.write("last", "two")
    loop.end()
    loop.join(10.0)
    assert loop.error == ""
    assert place.copy == {"model": "one", "last": "two"}
