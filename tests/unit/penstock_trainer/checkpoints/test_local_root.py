"""Which saves on a node's own disk a run continues from; those of several nodes are in tests/distributed/test_local_saves.py."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock_trainer.checkpoints.checkpointer import Checkpointer
from penstock_trainer.checkpoints.local_root import LocalRoot
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.restore import Restorer
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import FileStorage
from penstock_trainer.world import World
from unit.penstock_trainer.checkpoints.one_buffer import committed
from unit.penstock_trainer.checkpoints.one_matrix import Run, progress_at, state


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


class LocalRun:
    """A run of one rank that is started again and again on one node."""

    def __init__(self, directory: Path, world: World) -> None:
        self.root, self.disk = directory / "root", directory / "disk"
        self.config = Run(self.root, world).config
        self.world = world

    def local_root(self) -> LocalRoot:
        """Of a new attempt."""
        owner = take_ownership(self.root.as_uri(), FileStorage())
        return LocalRoot(str(self.disk), self.root.as_uri(), owner)

    def save(self, to_root: dict[int, bool]) -> Path:
        """By a new attempt; where on the disk it has put them."""
        local_root = self.local_root()
        more: dict[str, Any] = {"tokenizer_sha256": "ab" * 32, "local_root": local_root}
        uri, owner = self.root.as_uri(), local_root._owner
        with closing(Checkpointer(uri, owner, self.config, self.world, state(0.0), **more)) as checkpoints:
            for step, is_to_root in to_root.items():
                checkpoints.save(progress_at(step), state(float(step)), to_root=is_to_root)
                assert checkpoints.finish()
        return local_root.path

    def newest(self, config: JobConfig | None = None) -> int | None:
        """The step that a new attempt finds on the disk."""
        manifest = self.local_root().newest_on_all_nodes(config or self.config, self.world)
        return manifest.step if manifest else None

    def restored(self) -> tuple[int | None, float]:
        """(step, value) that a new attempt continues from."""
        more: dict[str, Any] = {"tokenizer_sha256": "ab" * 32, "local_root": self.local_root()}
        found = state(-1.0)
        progress = Restorer(self.root.as_uri(), self.config, self.world, **more).restore(found)
        return (progress.step if progress else None), float(found["model"]["weight"].max())


@pytest.fixture
def run(tmp_path: Path, world: World) -> LocalRun:
    return LocalRun(tmp_path, world)


def test_each_save_is_on_the_disk_and_only_those_that_are_due_are_in_the_root(
    run: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    disk = run.save({4: False, 8: False, 12: True})
    assert committed(disk) == [8, 12], "of which the newest two stay"
    assert committed(run.root) == [12]
    with caplog.at_level(logging.INFO):
        assert run.restored() == (12, 12.0)
    assert f"continuing from step 12 of {run.root.as_uri()}" in caplog.text


def test_a_later_save_on_the_disk_is_continued_from(run: LocalRun, caplog: pytest.LogCaptureFixture) -> None:
    disk = run.save({4: True, 8: False})
    with caplog.at_level(logging.INFO):
        assert run.restored() == (8, 8.0)
    assert f"continuing from step 8 on the nodes' own disks ({disk.as_uri()})" in caplog.text


def test_what_is_in_the_root_is_what_was_on_the_disk(run: LocalRun) -> None:
    disk = run.save({4: True})
    names = [path.relative_to(disk) for path in sorted(disk.rglob("*.distcp"))]
    assert names
    for name in names:
        assert (disk / name).read_bytes() == (run.root / name).read_bytes()


def test_a_damaged_save_on_the_disk_is_named_and_the_root_is_continued_from(
    run: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    disk = run.save({4: True, 8: False})
    [damaged] = disk.glob("step-00000008/*/0-0.distcp")
    damaged.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert run.restored() == (4, 4.0)
    assert damaged.as_uri() in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 2), ("strategy", "zero2"), ("config_hash", "another")],
)
def test_a_save_of_other_ranks_or_another_config_is_passed_over(
    run: LocalRun, field: str, value: object
) -> None:
    disk = run.save({4: True, 8: False})
    assert run.newest() == 8
    path = disk / "step-00000008/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert run.newest() == 4
    assert run.restored() == (4, 4.0)


def test_another_config_passes_over_all_of_it(run: LocalRun) -> None:
    run.save({4: False})
    assert run.newest(replace(run.config, seed=8)) is None


def test_an_attempts_own_saves_stay_when_it_rolls_back(run: LocalRun) -> None:
    local_root = run.local_root()
    more: dict[str, Any] = {"tokenizer_sha256": "ab" * 32, "local_root": local_root}
    uri, owner = run.root.as_uri(), local_root._owner
    with closing(Checkpointer(uri, owner, run.config, run.world, state(0.0), **more)) as checkpoints:
        for step, is_to_root in {4: True, 8: False}.items():
            checkpoints.save(progress_at(step), state(float(step)), to_root=is_to_root)
            assert checkpoints.finish()
        found = state(-1.0)
        assert Restorer(uri, run.config, run.world, **more).restore(found) == progress_at(4)
    assert run.restored() == (8, 8.0)


def test_a_root_that_was_begun_anew_is_not_continued_from_what_the_disk_has_of_before(run: LocalRun) -> None:
    run.save({4: False, 8: False})
    shutil.rmtree(run.root)
    # The first attempt on the new root has the old one's token; the next would take its saves for those of the first.
    assert run.restored() == (None, -1.0)
    assert run.restored() == (None, -1.0)
    run.save({2: False})
    assert run.restored() == (2, 2.0)


def test_disks_are_shared_by_runs_with_other_roots_and_cleared_one_by_one(
    tmp_path: Path, world: World
) -> None:
    one, other = LocalRun(tmp_path / "a", world), LocalRun(tmp_path / "b", world)
    other.disk = one.disk
    one.save({4: False})
    assert other.restored() == (None, -1.0)
    other.save({8: False})
    assert (one.restored(), other.restored()) == ((4, 4.0), (8, 8.0))
    one.local_root().remove()
    assert (one.restored(), other.restored()) == ((None, -1.0), (8, 8.0))
    one.local_root().remove()  # nothing there is no error


def test_a_disk_that_cannot_be_read_is_logged_and_the_root_is_continued_from(
    run: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    disk = run.save({4: True, 8: False})
    shutil.rmtree(disk)
    disk.touch()
    with caplog.at_level(logging.WARNING):
        assert run.restored() == (4, 4.0)
