"""The thread and the process that write a rank's saves, and what is left when they are lost: real processes on disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock_trainer.checkpoints.host_buffer import HostBuffer
from penstock_trainer.checkpoints.layout import PlannedChunk, PlannedObject, TensorInfo
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.saver import MAX_FAILURES, Group, Save, Saver
from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.errors import CheckpointError, FencedError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import FileStorage, StorageError, StorageUnavailableError
from penstock_trainer.world import World
from unit.penstock_trainer.checkpoints.one_buffer import committed, manifest_of, require_whole, setup_of
from unit.penstock_trainer.checkpoints.one_matrix import Run, progress_at, state

NUM_OBJECTS, OBJECT_BYTES = 400, 64 << 10
"""Written in about half a second: long enough to be killed in."""
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


class One:
    """A saver of one rank, whose buffer is many objects."""

    def __init__(self, saver: Saver, buffer: HostBuffer, owner: Owner) -> None:
        self.saver = saver
        self._buffer = buffer
        self.owner = owner

    def begin(self, step: int) -> None:
        self._buffer.tensor.fill_(step)
        manifest = manifest_of(self.owner, step)
        self.saver.begin(Save(step=step, directory=self.owner.attempt, manifest=manifest))

    def save(self, step: int) -> Exception | None:
        """What it ended with."""
        self.begin(step)
        assert self.saver.wait(TIMEOUT_SECONDS)
        return self.saver.last_error


@contextmanager
def saving(root: Path, world: World, **change: Any) -> Iterator[One]:
    """To be closed in time."""
    owner = take_ownership(root.as_uri(), FileStorage())
    buffer = HostBuffer(NUM_OBJECTS * OBJECT_BYTES)
    tensors = {"bytes": TensorInfo(dtype="uint8", shape=(NUM_OBJECTS, OBJECT_BYTES))}
    setup = setup_of(root, owner, **{"objects": tuple(planned()), "tensors": tensors, **change})
    saver = Saver(setup, buffer.fileno, world, Group(name="root", ranks=range(1), rank=0))
    try:
        yield One(saver, buffer, owner)
    finally:
        saver.close(TIMEOUT_SECONDS)
        buffer.close()
        assert writers() == []


def planned() -> Iterator[PlannedObject]:
    for row in range(NUM_OBJECTS):
        begin, end = row * OBJECT_BYTES, (row + 1) * OBJECT_BYTES
        chunk = PlannedChunk(
            fqn="bytes", offsets=(row, 0), sizes=(1, OBJECT_BYTES), begin=begin, length=OBJECT_BYTES
        )
        yield PlannedObject(name=f"0-{row}.distcp", begin=begin, end=end, chunks=(chunk,))


def writers() -> list[int]:
    """Process ids of the writers of this process that live."""
    found = []
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty once it is dead
            if b"penstock_trainer.checkpoints.writer" in command:
                found.append(pid)
    return found


def kill_writer() -> int:
    [pid] = writers()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_objects(root: Path, step: int, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(list(root.glob(f"step-{step:08d}/*/*.distcp"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_writer_that_is_killed_between_saves_is_started_again(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path, world) as one:
        assert one.save(4) is None
        before = kill_writer()
        assert one.save(8) is None
        assert writers() != [before]
        assert [step for step, _ in one.saver.take_committed()] == [4, 8]
        assert one.saver.take_committed() == []
    assert "the writer of rank 0 was lost (exit code -9); starting another" in caplog.text
    require_whole(tmp_path, 8)


@pytest.mark.parametrize("written", [1, NUM_OBJECTS // 2])
def test_a_writer_that_is_killed_while_it_writes_costs_no_save(
    tmp_path: Path, world: World, written: int
) -> None:
    with saving(tmp_path, world) as one:
        one.begin(8)
        wait_for_objects(tmp_path, 8, written)
        kill_writer()
        assert committed(tmp_path) == []
        assert one.saver.wait(TIMEOUT_SECONDS)
        assert one.saver.last_error is None
        assert [step for step, _ in one.saver.take_committed()] == [8]
    require_whole(tmp_path, 8)


def test_a_writer_that_is_lost_three_times_in_one_save_is_an_error_that_tells_of_memory(
    tmp_path: Path, world: World
) -> None:
    with saving(tmp_path, world) as one:
        one.begin(8)
        killed = set()
        while one.saver.is_busy:
            for pid in writers():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.001)
        assert len(killed) >= 3
        assert isinstance(one.saver.failure, CheckpointError)
        assert re.search(
            r"rank 0's checkpoints was lost 3 times in one save .* give it more", str(one.saver.failure)
        )
    assert committed(tmp_path) == []


def test_a_run_outlives_storage_that_is_away_for_two_saves_but_not_for_three(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The part of the node's own disk that it uploads from is what can be away without waiting minutes for it."""
    root, source = tmp_path / "root", tmp_path / "source"
    with saving(root, world, source_dir=str(source)) as one:
        assert isinstance(one.save(1), StorageUnavailableError)
        assert isinstance(one.save(2), StorageUnavailableError)
        assert one.saver.failure is None
        assert "step 2 was not saved; the run goes on, and the next save tries again" in caplog.text

        put_objects(source, one, 3)
        assert one.save(3) is None
        # Two and two are not three in a row.
        assert isinstance(one.save(4), StorageUnavailableError)
        assert isinstance(one.save(5), StorageUnavailableError)
        assert one.saver.failure is None
        assert isinstance(one.save(6), StorageUnavailableError)
        assert one.saver.failure is one.saver.last_error
        assert f"{source}/step-00000006" in str(one.saver.failure)
    assert MAX_FAILURES == 3
    assert committed(root) == [3]
    require_whole(root, 3)


def put_objects(source: Path, one: One, step: int) -> None:
    directory = source / f"step-{step:08d}" / one.owner.attempt
    directory.mkdir(parents=True)
    for row in range(NUM_OBJECTS):
        (directory / f"0-{row}.distcp").write_bytes(bytes([step]) * OBJECT_BYTES)


def test_a_directory_that_cannot_be_written_is_refused_at_once_and_named(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-00000008").touch()  # no directory: what a root may not write, root's own account may
    with saving(tmp_path, world) as one:
        error = one.save(8)
        assert type(error) is StorageError
        assert (tmp_path / "step-00000008").as_uri() in str(error)
        assert one.saver.failure is error
    assert "step 8 was not saved: StorageError: file://" in caplog.text


def test_a_saver_whose_root_was_taken_over_is_fenced(tmp_path: Path, world: World) -> None:
    with saving(tmp_path, world) as one:
        assert one.save(4) is None
        take_ownership(tmp_path.as_uri(), FileStorage())
        assert isinstance(one.save(8), FencedError)
        assert isinstance(one.saver.failure, FencedError)
    assert committed(tmp_path) == [4]


def test_a_save_that_is_under_way_at_the_end_is_a_checkpoint_if_there_is_time(
    tmp_path: Path, world: World
) -> None:
    with saving(tmp_path, world) as one:
        one.begin(8)
    require_whole(tmp_path, 8)


def test_a_save_that_is_under_way_at_the_end_is_given_up_if_there_is_none(
    tmp_path: Path, world: World
) -> None:
    with saving(tmp_path, world) as one:
        one.begin(8)
        wait_for_objects(tmp_path, 8, 1)
        began = time.monotonic()
        one.saver.close(timeout_seconds=0.0)
        assert time.monotonic() - began < 5.0
        assert writers() == []
    assert committed(tmp_path) == []


def test_what_must_be_stored_before_a_step_counts_is_asked_for_once_all_is_written(
    tmp_path: Path, world: World
) -> None:
    seen = []

    def look() -> None:
        seen.append((len(list(tmp_path.glob("step-00000008/*/*.distcp"))), committed(tmp_path)))
        raise StorageError("no room for the metrics")

    with saving(tmp_path, world) as one:
        told = manifest_of(one.owner, 8)
        one.saver.begin(Save(step=8, directory=one.owner.attempt, manifest=told, before_commit=look))
        assert one.saver.wait(TIMEOUT_SECONDS)
        assert "no room for the metrics" in str(one.saver.failure)
    assert seen == [(NUM_OBJECTS, [])]
    assert committed(tmp_path) == []


def test_a_run_learns_at_its_next_step_that_it_can_save_no_more(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path / "root", world)
    with run.checkpointer(run.attempt()) as checkpoints:
        checkpoints.save(progress_at(4), state(4.0))
        assert checkpoints.finish()
        checkpoints.raise_together()
        assert not checkpoints.has_failed

        run.attempt()
        checkpoints.save(progress_at(8), state(8.0))
        with pytest.raises(FencedError, match="which must not write any more"):
            checkpoints.wait(is_told_to_stop=lambda: False)
        assert checkpoints.has_failed
        with pytest.raises(FencedError, match="which must not write any more"):
            checkpoints.raise_together()
        with pytest.raises(FencedError):
            checkpoints.check_owner()
        assert [step for step, _ in checkpoints.committed()] == [4]
        assert checkpoints.last_seconds > 0
    assert run.restored() == (4, 4.0)


def test_a_run_whose_last_save_cannot_be_stored_ends_with_the_error(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path / "root", world)
    with run.checkpointer(run.attempt()) as checkpoints:
        shutil.rmtree(run.root)
        checkpoints.save(progress_at(4), state(4.0))
        with pytest.raises(StorageError, match=r"owner\.json does not exist"):
            checkpoints.finish()


def test_a_run_that_ends_before_its_first_save_leaves_no_trace_in_the_log(
    tmp_path: Path, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    with saving(tmp_path, world):
        pass
    assert capfd.readouterr().err == ""
