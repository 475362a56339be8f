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

from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.errors import CheckpointError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import FileStorage, crc32c
from penstock_trainer.world import World
from unit.penstock_trainer.checkpoints.one_matrix import Run, state


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


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
    assert (manifest.attempt, manifest.fencing_token) == (first.attempt, 1)
    assert (manifest.strategy, manifest.world_size, manifest.config_hash) == ("fsdp-full", 1, run.config.hash)
    assert manifest.config == json.loads(run.config.to_json())
    assert set(run.objects(8)) == {"0-0.distcp", "index.json"}
    for entry in manifest.objects:
        path = run.root / "step-00000008" / entry.name
        data = path.read_bytes()
        assert entry.name.startswith(f"{first.attempt}/")
        assert (entry.size, entry.crc32c) == (len(data), crc32c(data))
        assert entry.generation == path.stat().st_mtime_ns
    assert not [
        path for path in run.root.rglob("*") if path.is_file() and b"\x80\x04" in path.read_bytes()[:4]
    ]


def test_a_directory_without_a_manifest_is_ignored(run: Run) -> None:
    run.save(run.attempt(), 4, 8)
    run.manifest_path(8).unlink()
    assert run.restored() == (4, 4.0)


@pytest.mark.parametrize("name", ["0-0.distcp", "index.json"])
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
        data[0] ^= 1
    path.write_bytes(data if damage == "flip a bit" else data[:-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_object_that_breaks_while_it_is_read_falls_back_too(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(run.attempt(), 4, 8)
    path = run.objects(8)["0-0.distcp"]

    class Rotting(FileStorage):
        """Loses a bit of step 8 between the check of the whole object and the reading of its parts."""

        def read(self, uri: str, **range_and_generation: Any) -> bytes:
            if uri == path.as_uri():
                damage_file(path, "flip a bit")
            return super().read(uri, **range_and_generation)

    found = state(-1.0)
    with caplog.at_level(logging.WARNING):
        progress = run.restorer(Rotting()).restore(found)
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
    assert run.manifest(8).attempt == again.attempt
    assert run.restored() == (8, 8.0)


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
