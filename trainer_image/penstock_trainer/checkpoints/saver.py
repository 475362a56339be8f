"""Saves after their copy: the thread that has the writer write, gathers the ranks' receipts and has one rank's commit.

Receipts travel through the store that the ranks met at. No collective: those belong to the training thread, and a rank
whose objects are stored late must not hold up a step of the others.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._C._distributed_c10d import Store

from penstock_trainer.checkpoints.writer import Failure, Setup, failure_of
from penstock_trainer.checkpoints.writer_process import WriterLostError, WriterProcess, error_of
from penstock_trainer.contract.fields import canonical_json, from_dict
from penstock_trainer.errors import CheckpointError, PeerError
from penstock_trainer.storage import StorageUnavailableError
from penstock_trainer.world import World, first_line, is_lost_peer

logger = logging.getLogger(__name__)

MAX_WRITERS_LOST = 3
"""Of one save, after which it is given up: what kills the writer each time will go on doing so."""
MAX_FAILURES = 3
"""Saves one after the other that storage would not take, after which the run ends."""
_POLL_SECONDS = 0.05
_THREAD_SECONDS = 1.0
"""For the saver's thread to see that its writer is gone."""
_LAST_RECEIPTS_SECONDS = 0.5
"""After a peer was lost: those of the others may be on their way."""
_ENDED = "the run ended before its last save was a checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """What is written while the buffer holds it."""

    step: int
    directory: str
    """Below the step's; no other save of the run has it."""
    manifest: Mapping[str, Any]
    """See Committer.commit; used by the rank that commits."""
    before_commit: Callable[[], None] | None = None
    """On the rank that commits, once all is written."""
    to_root: bool = True
    """Whether a save that goes to a node's disk goes on from there."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """CRC32C by name of objects that come from the node's disk."""
    keep: Sequence[int] = ()
    """Steps that are not deleted, whatever their age."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks whose objects make one checkpoint; the first of them commits it."""

    name: str
    """Tells its receipts from those of other groups."""
    ranks: Sequence[int]
    rank: int
    """This one."""

    @property
    def commits(self) -> bool:
        """Whether it is this rank that does."""
        return self.rank == self.ranks[0]


class Saver:
    """One save at a time. For the training thread; nothing but `wait` and `close` blocks."""

    def __init__(
        self,
        setup: Setup,
        buffer_fileno: int,
        world: World,
        group: Group,
        *,
        on_written: Callable[[Save], None] | None = None,
    ) -> None:
        """`on_written` is called, in the saver's thread, when this rank's part of a save is stored."""
        self._setup = setup
        self._buffer_fileno = buffer_fileno
        self._group = group
        self._on_written = on_written
        self._store: Store | None = world.own_store() if len(group.ranks) > 1 else None
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._is_closing = False
        self._receipts_until = math.inf
        self._failures = 0
        self._committed: list[tuple[int, float]] = []
        self.last_seconds = 0.0
        self.failure: Exception | None = None
        """What makes further saves pointless."""
        self.last_error: Exception | None = None
        """Of the last save; None when it was stored and, on the rank that commits, committed."""
        self._writer = WriterProcess(self._setup, self._buffer_fileno)
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the buffer is still needed."""
        return not self._idle.is_set()

    def begin(self, save: Save) -> None:
        """Hand over a buffer that is filled. Only when not busy."""
        self._idle.clear()
        self.last_error = None
        self._queue.put(save)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until not busy; whether it is in time."""
        return self._idle.wait(timeout_seconds)

    def take_committed(self) -> list[tuple[int, float]]:
        """(step, seconds since its begin) of what became a checkpoint since the last call; on the rank that commits."""
        taken = self._committed[:]
        del self._committed[: len(taken)]
        return taken

    def close(self, timeout_seconds: float, *, peers_lost: bool = False) -> bool:
        """Give the writer so long to do what it was asked for, and end it. What is not a checkpoint by then is given up.

        Whether the saver's thread has ended too: it may be in a request to storage that nobody can cut short.

        With `peers_lost` receipts that are not there at once are not waited for: they may never come.
        """
        if peers_lost:
            self._receipts_until = time.monotonic() + _LAST_RECEIPTS_SECONDS
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        self._is_closing = True
        self._writer.kill()
        self._thread.join(_THREAD_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            began = time.monotonic()
            try:
                self._carry_out(save, began)
            except Exception as exc:
                lost = is_lost_peer(exc)
                self._fail(save, PeerError(first_line(exc), is_transient=True) if lost else exc)
            else:
                self._failures = 0
            self._idle.set()
        self._writer.close()

    def _carry_out(self, save: Save, began: float) -> None:
        try:
            receipt = self._ask(
                "write", {"step": save.step, "directory": save.directory, "expected": save.expected}
            )
        except Exception as exc:
            self._tell(save, {"failed": failure_of(exc)})
            raise
        self._tell(save, {"written": receipt})
        if self._on_written:
            written = {entry["name"]: entry["crc32c"] for entry in receipt["objects"]}
            self._on_written(replace(save, expected=written))
        if not self._group.commits:
            return
        receipts = [receipt, *self._receipts_of_others(save)]
        if save.before_commit and self._setup.asks_owner:
            save.before_commit()
        told = {
            "manifest": save.manifest,
            "directory": save.directory,
            "receipts": receipts,
            "keep": save.keep,
        }
        self._ask("commit", told)
        seconds = time.monotonic() - began
        self.last_seconds = seconds
        self._committed.append((save.step, seconds))
        logger.info("saved step %d to %s in %.1f s", save.step, self._setup.root_uri, seconds)

    def _ask(self, command: str, told: Mapping[str, Any]) -> Any:
        """The writer's answer. A writer that was lost is started again: the buffer still has what it has to write."""
        for lost in range(MAX_WRITERS_LOST):
            if self._is_closing:  # `close` ends the writer that it sees, which may have been the one before
                raise PeerError(_ENDED)
            try:
                return self._writer.ask(command, told)
            except WriterLostError as exc:
                if self._is_closing:
                    raise PeerError(_ENDED) from exc
                logger.warning("the writer of rank %d was lost (%s); starting another", self._group.rank, exc)
                self._writer.close()
                self._writer = WriterProcess(self._setup, self._buffer_fileno)
                if lost == MAX_WRITERS_LOST - 1:
                    raise CheckpointError(
                        f"the process that writes rank {self._group.rank}'s checkpoints was lost {MAX_WRITERS_LOST} times "
                        f"in one save ({exc}). If the node runs out of memory, give it more: a save keeps a copy of the "
                        "rank's state in host memory."
                    ) from exc
        raise AssertionError("the last try returns or raises")

    def _tell(self, save: Save, answer: Mapping[str, Any]) -> None:
        """The rank that commits how the write ended."""
        if self._store is not None and not self._group.commits:
            self._store.set(self._key(save, self._group.rank), canonical_json(answer))

    def _receipts_of_others(self, save: Save) -> list[Mapping[str, Any]]:
        """Blocks until all ranks of the group have written. Raises what a rank failed with."""
        # All are taken out of the store before one that failed is raised.
        told = {rank: json.loads(self._received(self._key(save, rank))) for rank in self._group.ranks[1:]}
        for rank, answer in told.items():
            if "failed" in answer:
                failure = from_dict(Failure, answer["failed"])
                raise error_of(Failure(kind=failure.kind, error=f"rank {rank}: {failure.error}"))
        return [answer["written"] for answer in told.values()]

    def _received(self, key: str) -> bytes:
        """Polled: a wait would keep the connection, and `close` would have to wait with it."""
        assert self._store is not None
        while not self._store.check([key]):
            if self._is_closing or time.monotonic() > self._receipts_until:
                raise PeerError("the run ended before every rank had written its part of the checkpoint")
            time.sleep(_POLL_SECONDS)
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value

    def _fail(self, save: Save, error: Exception) -> None:
        self._failures += 1
        self.last_error = error
        is_transient = isinstance(error, StorageUnavailableError) and self._failures < MAX_FAILURES
        if not is_transient:
            self.failure = error
        logger.error(
            "step %d was not saved%s: %s",
            save.step,
            "; the run goes on, and the next save tries again" if is_transient else "",
            first_line(error),
        )

    def _key(self, save: Save, rank: int) -> str:
        return f"checkpoint/{self._group.name}/{save.directory}/{save.step}/{rank}"
