"""Where the wall time of an attempt goes, recorded while it goes there, so that a killed attempt is known too.

A thread of rank 0 overwrites `<root>/goodput/<attempt>.json` every half minute, more often at first, at every commit of a
checkpoint and at the end. The training thread never waits for it but at the end. What is counted as what:
contract/goodput.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.goodput import (
    FORMAT_VERSION,
    AttemptOutcome,
    AttemptRecord,
    AttemptSeconds,
    Category,
    Mark,
    goodput_dir_uri,
    join_attempts,
    readable_records,
    record_uri,
)
from penstock_trainer.storage import Storage, StorageError, storage_for

logger = logging.getLogger(__name__)

_MOST_MARKS = 128
_BETWEEN_WRITES_SECONDS = 1.0
"""At least: Cloud Storage takes one write a second of the same object."""
_STAT = Path("/proc/self/stat")


class GoodputLog:
    """The clock and the record of one attempt; on ranks other than 0 (`writes=False`) only the clock.

    Time before the first step is start-up, after the last `other`, and what `span` says in between. Every method is for
    the training thread alone, but for `committed` and `record`, which any thread may call. None raises what storage
    raises: that is logged once.
    """

    def __init__(
        self,
        root_uri: str,
        owner: Owner,
        *,
        world_size: int,
        num_nodes: int,
        save_interval: int,
        storage: Storage | None = None,
        writes: bool = True,
        interval_seconds: float = 30.0,
        now: Callable[[], float] | None = None,
        started_at: float | None = None,
    ) -> None:
        """Begins to write at once, from a thread. `now` gives seconds since the epoch and never steps back.

        `started_at`: of the process, in `now`'s time; None asks the kernel.
        """
        self._now = now or steady_clock()
        self._since = self._now()
        self._started_at = self._since - process_age_seconds() if started_at is None else started_at
        self._root_uri = root_uri
        self._interval_seconds = interval_seconds
        self._category: Category = "startup"
        self._seconds: dict[Category, float] = {"startup": self._since - self._started_at}
        self._last_step: int | None = None
        self._saving: dict[int, float] = {}
        self._record = AttemptRecord(
            format_version=FORMAT_VERSION,
            attempt=owner.attempt,
            fencing_token=owner.fencing_token,
            world_size=world_size,
            num_nodes=num_nodes,
            save_interval=save_interval,
            started_at=self._started_at,
            updated_at=self._since,
        )
        self._lock = threading.Lock()
        self._changed, self._closing = threading.Event(), threading.Event()
        self._has_warned = False
        self._thread: threading.Thread | None = None
        if writes:
            self._storage = storage or storage_for(root_uri)
            self._thread = threading.Thread(target=self._write_until_closed, name="goodput", daemon=True)
            self._thread.start()

    @contextmanager
    def span(self, category: Category) -> Iterator[None]:
        """Within it time is of this category; after it, of the one before. Spans nest: the inner one counts.

        The first span of `compute` is the first step's beginning, and ends start-up. A device is not waited for: where it
        lags behind the host, wait for it before a span that is not to have its time.
        """
        before = self._enter(category)
        try:
            yield
        finally:
            is_training_over = before == "startup" and self._record.first_step_at is not None
            self._enter("other" if is_training_over else before)

    def restored(self, step: int) -> None:
        """Training goes on from this step; 0 without a checkpoint. Once, before the first step."""
        with self._lock:
            self._record = replace(self._record, resumed_from=step)
            self._last_step = step

    def step_done(self, step: int) -> None:
        """So many steps are done. For every step: it costs an assignment."""
        self._last_step = step

    def rolled_back(self, step: int) -> None:
        """The run goes on from an earlier step of its own; what was computed since counts as lost."""
        with self._lock:
            record = self._as_of(self._now())
            kept = record.compute_until(step)
            lost = record.seconds.compute - kept
            self._seconds["compute"] = self._seconds.get("compute", 0.0) - lost
            self._last_step = step
            self._record = replace(
                self._record,
                resumed_from=step if record.resumed_from is None else min(record.resumed_from, step),
                seconds=replace(self._record.seconds, rolled_back=self._record.seconds.rolled_back + lost),
                marks=tuple(mark for mark in record.marks if mark.step <= step),
            )

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Within it the step's state is taken and training stands still; it counts as blocked by saving.

        Its time is the cost of a save from which the interval is recommended. So put around it what every save costs at
        any interval, and what waits for an earlier save to be written, or at the end for the last, in
        `span("blocked_by_saving")` beside it. A save that is left out is none; one that raises does not count as one.
        """
        with self.span("blocked_by_saving"):
            with self._lock:
                began = self._since
                self._saving[step] = began
                spent = self._seconds.get("compute", 0.0)
            yield
        with self._lock:
            saves = self._record.saves
            stall = self._since - began
            self._record = replace(
                self._record,
                saves=replace(saves, taken=saves.taken + 1, stall_seconds=saves.stall_seconds + stall),
                marks=_thinned((*self._record.marks, Mark(step=step, compute_seconds=spent))),
            )

    def committed(self, step: int, write_seconds: float | None = None) -> None:
        """The step became a checkpoint, so many seconds after its save began; None: now.

        From any thread; nothing happens for a step that `saving` was not told.
        """
        with self._lock:
            began = self._saving.pop(step, None)
            if began is None:
                return
            self._saving = {other: at for other, at in self._saving.items() if other > step}
            saves = self._record.saves
            seconds = self._now() - began if write_seconds is None else write_seconds
            self._record = replace(
                self._record,
                committed_step=step,
                saves=replace(
                    saves, committed=saves.committed + 1, write_seconds=saves.write_seconds + seconds
                ),
            )
        self._changed.set()

    def record(self) -> AttemptRecord:
        """What is known now."""
        with self._lock:
            return self._as_of(self._now())

    def close(self, outcome: AttemptOutcome, *, timeout_seconds: float = 10.0) -> None:
        """The attempt ends here: write its last record and, when the run is done, log what all attempts came to.

        Blocks for `timeout_seconds` at most. A second call does nothing.
        """
        if self._closing.is_set():
            return
        with self._lock:
            ended_at = self._now()
            self._record = replace(self._as_of(ended_at), ended_at=ended_at, outcome=outcome)
        self._closing.set()
        self._changed.set()
        if self._thread is None:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "the last goodput record of attempt %s was not written within %g s",
                *(self._record.attempt, timeout_seconds),
            )

    def _enter(self, category: Category) -> Category:
        """The category before."""
        with self._lock:
            now, before = self._now(), self._category
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
            self._since, self._category = now, category
            if category == "compute" and self._record.first_step_at is None:
                self._record = replace(self._record, first_step_at=now)
            return before

    def _as_of(self, now: float) -> AttemptRecord:
        """With the lock held."""
        if self._record.ended_at is not None:
            return self._record
        seconds = {**self._seconds}
        seconds[self._category] = seconds.get(self._category, 0.0) + now - self._since
        return replace(
            self._record,
            updated_at=now,
            last_step=self._last_step,
            seconds=AttemptSeconds(rolled_back=self._record.seconds.rolled_back, **seconds),
        )

    def _write_until_closed(self) -> None:
        while not self._closing.is_set():
            self._write()
            self._closing.wait(_BETWEEN_WRITES_SECONDS)
            self._changed.wait(self._until_next_write() - _BETWEEN_WRITES_SECONDS)
            self._changed.clear()
        self._write()
        if self._record.outcome == "done":
            self._tell_run()

    def _until_next_write(self) -> float:
        """A twentieth of its age, so that little is unknown of an attempt that is killed early; later the interval."""
        return min(self._interval_seconds, (self._now() - self._started_at) / 20)

    def _write(self) -> None:
        record = self.record()
        uri = record_uri(self._root_uri, record.attempt)
        try:
            self._storage.write(uri, record.to_json().encode(), content_type="application/json")
        except Exception as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "where time goes cannot be recorded: %s. The run goes on; that is said once", exc
                )

    def _tell_run(self) -> None:
        try:
            records = read_records(self._root_uri, self._storage)
        except StorageError as exc:
            logger.warning("the goodput of the attempts before cannot be read: %s", exc)
            records = []
        own = self._record
        others = [record for record in records if record.attempt != own.attempt]
        goodput = join_attempts([*others, own], is_over=True)
        logger.info("%s; interruptions: %s", goodput.told(), goodput.told_interruptions())
        logger.info("checkpoint interval: %s", goodput.told_interval())


def read_records(root_uri: str, storage: Storage) -> list[AttemptRecord]:
    """Of all attempts below a checkpoint root. Blocks on storage and raises StorageError."""
    found = storage.list_objects(f"{goodput_dir_uri(root_uri)}/")
    return readable_records({info.uri: storage.read(info.uri) for info in found})


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as the wall clock has them now; from here on nothing sets them back or forward."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def process_age_seconds() -> float:
    """Since the kernel started this process, to its tick of 10 ms; 0 where there is no /proc."""
    try:
        stat = _STAT.read_text()
    except OSError:
        return 0.0
    # The 22nd field; the second is the program's name in parentheses and may hold anything.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _thinned(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """Every other of the older half is left out of too many: a run continues from new ones."""
    half = _MOST_MARKS // 2
    return marks if len(marks) <= _MOST_MARKS else (*marks[:half:2], *marks[half:])
