"""The commit protocol, and which checkpoint a run continues from."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.tiny_run import tiny_config
from penstock_trainer.checkpoint import Checkpointer, Progress, Snapshot
from penstock_trainer.contract.checkpoint import Manifest, Owner
from penstock_trainer.errors import CheckpointError, FencedError
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import FileStorage, crc32c
from penstock_trainer.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


class Run:
    """Attempts on one checkpoint root whose state is one matrix and one moment, both filled with the step."""

    def __init__(self, root: Path, world: World, *, resume_from: str = "") -> None:
        self.root = root
        self.tokenizer_sha256 = "ab" * 32
        self._world = world
        config = tiny_config("file:///data", root.as_uri())
        self.config = replace(config, checkpoint=replace(config.checkpoint, resume_from=resume_from))

    def attempt(self, storage: FileStorage | None = None) -> Checkpointer:
        """A new owner of the root."""
        uri = self.root.as_uri()
        return Checkpointer(
            uri,
            take_ownership(uri, FileStorage()),
            self.config,
            self._world,
            storage,
            tokenizer_sha256=self.tokenizer_sha256,
        )

    def save(self, checkpoints: Checkpointer, *steps: int) -> None:
        for step in steps:
            progress = Progress(step=step, samples_seen=12 * step, tokens_seen=384 * step)
            checkpoints.save(Snapshot(progress, state(float(step))))

    def restored(self) -> tuple[int | None, float]:
        """(step, value) that a new attempt continues from."""
        found = state(-1.0)
        progress = self.attempt().restore(found)
        values = [found["model"]["weight"], *found["opt"]["state"]["weight"].values()]
        assert len({float(value.min()) for value in values} | {float(value.max()) for value in values}) == 1
        if progress is not None:
            assert (progress.samples_seen, progress.tokens_seen) == (12 * progress.step, 384 * progress.step)
        return (progress.step if progress else None), float(values[0].max())

    def manifest(self, step: int) -> Manifest:
        return Manifest.from_json(self.manifest_path(step).read_bytes())

    def manifest_path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}" / "manifest.json"

    def objects(self, step: int) -> dict[str, Path]:
        """Paths of a step's objects by their last name."""
        names = [entry.name for entry in self.manifest(step).objects]
        return {Path(name).name: self.root / f"step-{step:08d}" / name for name in names}


def state(value: float) -> dict[str, Any]:
    matrix = torch.full((3, 5), value)
    moment = {
        "step": torch.tensor(value),
        "exp_avg": torch.full((3, 5), value),
        "exp_avg_sq": torch.full((3, 5), value),
    }
    return {"model": {"weight": matrix}, "opt": {"state": {"weight": moment}}}


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    return Run(tmp_path / "root", world)


def test_an_empty_root_has_nothing_to_continue_from(run: Run) -> None:
    assert run.restored() == (None, -1.0)


def test_the_newest_checkpoint_is_continued_and_its_manifest_pins_every_object(run: Run) -> None:
    first = run.attempt()
    run.save(first, 4, 8)
    assert run.restored() == (8, 8.0)

    manifest = run.manifest(8)
    assert (manifest.attempt, manifest.fencing_token) == (first.owner.attempt, 1)
    assert (manifest.strategy, manifest.world_size, manifest.config_hash) == ("fsdp-full", 1, run.config.hash)
    assert manifest.config == json.loads(run.config.to_json())
    assert set(run.objects(8)) == {"0.distcp", "index.json"}
    for entry in manifest.objects:
        path = run.root / "step-00000008" / entry.name
        data = path.read_bytes()
        assert entry.name.startswith(f"{first.owner.attempt}/")
        assert (entry.size, entry.crc32c) == (len(data), crc32c(data))
        assert entry.generation == path.stat().st_mtime_ns
    assert not [
        path for path in run.root.rglob("*") if path.is_file() and b"\x80\x04" in path.read_bytes()[:4]
    ]


def test_a_directory_without_a_manifest_is_ignored(run: Run) -> None:
    run.save(run.attempt(), 4, 8)
    run.manifest_path(8).unlink()
    assert run.restored() == (4, 4.0)


@pytest.mark.parametrize("name", ["0.distcp", "index.json"])
@pytest.mark.parametrize("damage", ["flip a bit", "cut short", "remove"])
def test_a_damaged_object_falls_back_to_the_checkpoint_before_and_names_it(
    run: Run, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    run.save(run.attempt(), 4, 8)
    path = run.objects(8)[name]
    damage_file(path, damage)
    with caplog.at_level(logging.WARNING):
        assert run.restored() == (4, 4.0)
    assert path.as_uri() in caplog.text
    assert "falling back to the checkpoint before" in caplog.text


def damage_file(path: Path, damage: str) -> None:
    """As bit rot does it: the modification time, which is the generation on disk, stays."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
        return
    if damage == "flip a bit":
        data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "flip a bit" else data[:-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_object_that_breaks_while_it_is_read_falls_back_too(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(run.attempt(), 4, 8)
    path = run.objects(8)["0.distcp"]

    class Rotting(FileStorage):
        """Loses a bit of step 8 between the check of the whole object and the reading of its parts."""

        def read(self, uri: str, **range_and_generation: Any) -> bytes:
            if uri == path.as_uri():
                damage_file(path, "flip a bit")
            return super().read(uri, **range_and_generation)

    found = state(-1.0)
    with caplog.at_level(logging.WARNING):
        progress = run.attempt(Rotting()).restore(found)
    assert progress is not None
    assert (progress.step, float(found["model"]["weight"].max())) == (4, 4.0)
    assert "are corrupt: expected crc32c" in caplog.text


def test_a_damaged_manifest_is_passed_over_and_replaced_when_its_step_is_written_again(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(run.attempt(), 4, 8)
    run.manifest_path(8).write_text('{"format_version": 1, "step"')
    with caplog.at_level(logging.WARNING):
        assert run.restored() == (4, 4.0)
    assert "the checkpoint manifest is not JSON" in caplog.text

    again = run.attempt()
    run.save(again, 8)
    assert run.manifest(8).attempt == again.owner.attempt
    assert run.restored() == (8, 8.0)


def test_a_writer_that_was_overtaken_stops_before_it_writes(run: Run) -> None:
    old = run.attempt()
    run.save(old, 4)
    new = run.attempt()
    with pytest.raises(FencedError, match=rf"belongs to attempt {new.owner.attempt} with fencing token 2"):
        run.save(old, 8)
    assert not (run.root / "step-00000008").exists()
    run.save(new, 8)


def test_a_writer_that_is_overtaken_while_it_writes_does_not_commit(run: Run) -> None:
    old = run.attempt()
    progress = Progress(step=8, samples_seen=96, tokens_seen=3072)
    written = old._write(Snapshot(progress, state(8.0)), (run.root / "step-00000008").as_uri())
    run.attempt()
    with pytest.raises(FencedError, match="must not write any more"):
        old._commit(progress, written)
    assert not run.manifest_path(8).exists()
    assert run.restored() == (None, -1.0)


def test_a_writer_that_is_overtaken_after_its_last_check_leaves_its_successors_manifest(run: Run) -> None:
    class Paused(FileStorage):
        """Stands still between the check of the owner and the commit, while a new attempt saves the same step."""

        is_pausing = False

        def read(self, uri: str, **range_and_generation: Any) -> bytes:
            data = super().read(uri, **range_and_generation)
            if uri.endswith("/owner.json") and self.is_pausing:
                self.is_pausing = False
                run.save(run.attempt(), 8)
            return data

    storage = Paused()
    old = run.attempt(storage)
    progress = Progress(step=8, samples_seen=96, tokens_seen=3072)
    written = old._write(Snapshot(progress, state(-8.0)), (run.root / "step-00000008").as_uri())
    storage.is_pausing = True
    with pytest.raises(FencedError, match="fencing token 2"):
        old._commit(progress, written)
    assert run.manifest(8).fencing_token == 2
    assert run.restored() == (8, 8.0)


def test_a_manifest_of_a_higher_token_is_not_replaced_although_the_owner_says_so(run: Run) -> None:
    run.attempt()
    run.save(run.attempt(), 8)
    (run.root / "owner.json").unlink()
    with pytest.raises(FencedError, match=r"fencing token 2; this is attempt .* with token 1"):
        run.save(run.attempt(), 8)
    assert run.manifest(8).fencing_token == 2


def test_another_tokenizer_is_an_error_that_says_where_the_earlier_one_is(run: Run) -> None:
    run.save(run.attempt(), 4)
    assert run.manifest(4).tokenizer_sha256 == "ab" * 32
    run.tokenizer_sha256 = "cd" * 32
    message = r"another tokenizer.*Stage the data with tokenizer_uri = file:///data/tokenizer.json"
    with pytest.raises(CheckpointError, match=message):
        run.restored()


def test_other_data_of_the_same_tokenizer_is_continued_and_told(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(run.attempt(), 4)
    with caplog.at_level(logging.INFO):
        assert run.restored() == (4, 4.0)
        assert "other data" not in caplog.text
        run.config = replace(run.config, data=replace(run.config.data, uri="file:///more"))
        assert run.restored() == (4, 4.0)
    assert "other data of the same tokenizer: file:///more after file:///data" in caplog.text


def test_a_finished_run_is_continued_by_itself_but_not_by_resume_from(tmp_path: Path, world: World) -> None:
    earlier = Run(tmp_path / "earlier", world)
    earlier.save(earlier.attempt(), earlier.config.steps)
    assert earlier.restored() == (12, 12.0)
    run = Run(tmp_path / "own", world, resume_from=earlier.root.as_uri())
    with pytest.raises(CheckpointError, match=r"at step 12 .* steps = 12, .* Raise steps above 12"):
        run.restored()
    run.config = replace(run.config, steps=13)
    assert run.restored() == (12, 12.0)


def test_a_checkpoint_beyond_the_last_step_is_an_error(run: Run) -> None:
    run.save(run.attempt(), 16)
    with pytest.raises(CheckpointError, match=r"at step 16 and the run ends at steps = 12"):
        run.restored()


def test_resume_from_is_read_only_while_the_own_root_is_empty(tmp_path: Path, world: World) -> None:
    earlier = Run(tmp_path / "earlier", world)
    earlier.save(earlier.attempt(), 4)
    run = Run(tmp_path / "own", world, resume_from=earlier.root.as_uri())
    assert run.restored() == (4, 4.0)
    run.save(run.attempt(), 6)
    earlier.save(earlier.attempt(), 8)
    assert run.restored() == (6, 6.0)


def test_resume_from_without_a_checkpoint_is_an_error(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path / "own", world, resume_from=(tmp_path / "none").as_uri())
    with pytest.raises(CheckpointError, match=r"resume_from = 'file://.*/none' has no checkpoint"):
        run.restored()


def test_a_checkpoint_of_another_shape_is_an_error_that_names_the_field(run: Run) -> None:
    run.save(run.attempt(), 4)
    run.config = replace(run.config, model=replace(run.config.model, ffn_dim=64))
    with pytest.raises(CheckpointError, match=r"model\.ffn_dim = 52 \(here 64\)"):
        run.restored()


def test_an_attempt_of_the_launcher_is_taken_as_it_is() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "PENSTOCK_ATTEMPT": "abc",
        "PENSTOCK_FENCING_TOKEN": "5",
    }
    env = RankEnv.from_environ(environ)
    assert env.owner == Owner(attempt="abc", fencing_token=5)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 4, 1, 2)
    alone = RankEnv.from_environ({"RANK": "1"})
    assert (alone.rank, alone.world_size, alone.master_addr, alone.owner) == (0, 1, None, None)
