"""One round of a job as a node's launcher follows it: from the start of the ranks to the verdict of all nodes."""

from __future__ import annotations

import logging
import math
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from penstock_trainer.cluster import Cluster
from penstock_trainer.errors import FencedError
from penstock_trainer.heartbeat import WATCHED
from penstock_trainer.outcome import RETRYABLE, NodeEnd, RankEnd, Silence, Verdict, decide
from penstock_trainer.ranks import RankProcess, Ranks
from penstock_trainer.rendezvous import Plan, Rendezvous, RendezvousError
from penstock_trainer.script_checkpoints import SyncLoop
from penstock_trainer.storage import StorageError

logger = logging.getLogger(__name__)

Events = queue.SimpleQueue[RankEnd | int]
"""Ends of ranks, and signal numbers. SimpleQueue.put is reentrant, hence allowed in a signal handler."""

Replan = Callable[[Sequence[RankEnd]], Plan | None]
"""The plan of another round after one that ended so, or None when none may follow. Blocks on storage and raises
StorageError, and FencedError when the job belongs to another attempt by now."""

_TRACEBACK_SECONDS = 1.0
"""For a rank that hangs to write its tracebacks, before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long the launcher waits for what."""

    join_seconds: float = 900.0
    """For all nodes to come up: they start minutes apart, and each may have to pull an image of 10 GB."""
    save_seconds: float = 25.0
    """Between a forwarded SIGTERM and SIGKILL. A Spot VM is gone 30 s after its notice."""
    peer_seconds: float = 10.0
    """Between the bad end of one rank and SIGKILL for the others: long enough to notice a broken connection and to
    report it, far shorter than a collective's timeout."""
    beat_seconds: float = 5.0
    """Between two signs of life of a launcher."""
    silence_seconds: float = 60.0
    """Without a sign of life after which a node is given up: 12 missed ones, or a live migration's pause."""
    farewell_seconds: float = 5.0
    """For the other launchers to read the verdict before the primary takes the store away."""
    poll_seconds: float = 1.0
    """Between two looks at the store while ranks run; ten times as often when they have ended."""
    hung_seconds: float = math.inf
    """Without a sign of life of a rank that trains or evaluates, after which it is killed. Of no effect for ranks that
    give none, as a script's."""


class Signals:
    """SIGTERM and SIGINT as events, while it is entered. Main thread only."""

    def __init__(self) -> None:
        self.queue: Events = queue.SimpleQueue()
        self._received: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def check(self) -> None:
        """Raise RendezvousError if a signal has come: before ranks have started there is nothing to save."""
        if self._received is not None:
            raise RendezvousError(f"{signal.Signals(self._received).name} before all nodes had joined")

    def repeat(self) -> None:
        """Put a signal that has come into the queue again: it came too late for the round that is over."""
        if self._received is not None and self.queue.empty():
            self.queue.put(self._received)

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        self.queue.put(number)


class Watch:
    """Follows the ranks of this node, and the other launchers, to the verdict of one round."""

    def __init__(
        self,
        ranks: Ranks,
        rendezvous: Rendezvous,
        cluster: Cluster,
        timing: Timing,
        *,
        replan: Replan | None,
        sync: SyncLoop | None = None,
    ) -> None:
        """`replan` is the primary's, and None on every other node. `sync` runs; its last one is waited for."""
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._cluster = cluster
        self._timing = timing
        self._replan = replan
        self._sync = sync
        self._ends: list[RankEnd] = []
        self._silent: list[int] = []
        self._hung: dict[RankProcess, float] = {}
        """Ranks that were given up, and when each is killed."""
        self._listened_at = self._awake_since = time.monotonic()
        self._next_beat = 0.0
        self._failed = False
        self._told = False
        self._told_to_stop = False
        self._cut_off = False
        self._kill_at = math.inf
        """When ranks that are left are killed."""
        self._leave_at = math.inf
        """When this launcher no longer waits for the others."""

    def run(self, events: Events) -> Verdict:
        """Block until the round's verdict is known, here and to the nodes that are there.

        Every rank of this node has ended then, or is about to be killed by the launcher that leaves without the others.
        """
        while True:
            with suppress(queue.Empty):
                self._handle(events.get(timeout=self._timing.poll_seconds / (10 if self._ended else 1)))
            self._listen()
            if time.monotonic() > self._kill_at:
                self._ranks.kill()
            verdict = self._alone() if self._cut_off else self._confer()
            if verdict is not None:
                return verdict

    def _handle(self, event: RankEnd | int) -> None:
        if isinstance(event, int):
            self._tell_to_stop(event)
            return
        self._ends.append(event)
        if event.outcome == "preempted":
            self._hurry(self._timing.save_seconds)
        elif event.outcome != "done":
            self._failed = True
            self._hurry(self._timing.peer_seconds)

    def _tell_to_stop(self, number: int) -> None:
        """Once: a rank that saves may take a second SIGTERM for impatience, and its time is running already."""
        if self._told_to_stop:
            return
        logger.info("%s: ranks have %.0f s to save", signal.Signals(number).name, self._timing.save_seconds)
        self._told_to_stop = True
        # Ctrl-C asks for the same, and trainers know one signal for it.
        self._ranks.signal(signal.SIGTERM)
        self._hurry(self._timing.save_seconds)
        self._leave_at = self._kill_at + self._timing.farewell_seconds

    def _listen(self) -> None:
        """Give up ranks of which nothing is heard, and kill them when they have had the time for their tracebacks.

        Their end is then like any other: it is told to the other nodes, whose ranks wait for them.
        """
        now = time.monotonic()
        if now - self._listened_at > self._timing.hung_seconds / 2:
            self._awake_since = now  # this launcher was held up, and its ranks may have been with it
        self._listened_at = now
        heard = {rank: silence for rank in self._ranks if (silence := rank.last_heard()) is not None}
        hung = [rank for rank, silence in heard.items() if self._is_hung(silence, now)]
        if hung:
            _tell_silence(heard)
        for rank in hung:
            rank.give_up(heard[rank])
            self._hung[rank] = now + _TRACEBACK_SECONDS
        for rank, kill_at in self._hung.items():
            if now > kill_at:
                rank.kill()

    def _is_hung(self, silence: Silence, now: float) -> bool:
        seconds = min(silence.pulse.age_seconds, now - self._awake_since)
        return silence.pulse.phase in WATCHED and seconds > self._timing.hung_seconds

    @property
    def _ended(self) -> bool:
        return len(self._ends) == len(self._ranks)

    @property
    def _synced(self) -> bool:
        """Whether the last sync has ended, well or not; it is asked for by the first look."""
        if self._sync is None:
            return True
        self._sync.end()
        return not self._sync.is_alive()

    @property
    def _end(self) -> NodeEnd:
        return NodeEnd(
            ranks=tuple(self._ends),
            told_to_stop=self._told_to_stop,
            unsaved=self._sync.error if self._sync else "",
        )

    def _hurry(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _confer(self) -> Verdict | None:
        """One exchange with the other launchers; without the store the job cannot go on."""
        try:
            self._beat()
            self._share_failure()
            if not self._ended or not self._synced:
                return None
            if not self._told:
                self._rendezvous.tell_end(self._end)
                self._told = True
            return self._gather() if self._cluster.is_primary else self._await_verdict()
        except RendezvousError as exc:
            logger.error("%s", exc)
            self._cut_off = True
            self._hurry(self._timing.peer_seconds)  # the ranks have a moment to notice it too
            return None

    def _alone(self) -> Verdict | None:
        return decide(self._ends, lost_nodes=[0]) if self._ended and self._synced else None

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._timing.beat_seconds
        self._rendezvous.beat()
        if self._cluster.is_primary:
            self._silent = self._rendezvous.silent_nodes(self._timing.silence_seconds)

    def _share_failure(self) -> None:
        """A bad end anywhere ends the round everywhere: ranks that wait in a collective would not notice by themselves."""
        if self._rendezvous.failure_told():
            self._hurry(self._timing.peer_seconds)
        elif self._failed or self._silent:
            self._rendezvous.tell_failure()

    def _await_verdict(self) -> Verdict | None:
        verdict = self._rendezvous.verdict()
        if verdict is None and time.monotonic() > self._leave_at:
            return decide(self._ends, lost_nodes=[0])
        return verdict

    def _gather(self) -> Verdict | None:
        """The primary's verdict, once every node has told or is given up."""
        told = self._rendezvous.told_ends()
        missing = set(range(1, self._cluster.num_nodes)) - set(told)
        lost = sorted(missing if time.monotonic() > self._leave_at else missing & set(self._silent))
        if missing - set(lost):
            return None
        nodes = [self._end, *told.values()]
        ends = [end for node in nodes for end in node.ranks]
        verdict = decide(ends, lost)
        unsaved = [node.unsaved for node in nodes if node.unsaved]
        if verdict.exit_code == 0 and unsaved:
            verdict = Verdict(
                exit_code=RETRYABLE,
                reason=f"all ranks are done, but a checkpoint was not saved: {unsaved[0]}",
            )
        if not (lost or self._silent or any(node.told_to_stop for node in nodes)):
            verdict = self._offer_restart(verdict, ends)
        self._rendezvous.publish_verdict(verdict, timeout_seconds=self._timing.farewell_seconds, absent=lost)
        return verdict

    def _offer_restart(self, verdict: Verdict, ends: Sequence[RankEnd]) -> Verdict:
        """The verdict that sends all launchers into another round, or the one given when none may follow."""
        try:
            plan = self._replan(ends) if self._replan else None
        except (StorageError, FencedError) as exc:
            exit_code = 1 if isinstance(exc, FencedError) else RETRYABLE
            return Verdict(exit_code=exit_code, reason=f"no restart in place ({exc}) after: {verdict.reason}")
        if plan is None:
            return verdict
        self._rendezvous.publish_plan(plan)  # first: the verdict sends launchers to read it
        return replace(verdict, restart=True)


def _tell_silence(heard: Mapping[RankProcess, Silence]) -> None:
    """Log what was last heard of every rank of this node, those that are behind first."""
    told = sorted(heard.items(), key=lambda item: item[1].order)
    logger.error("hung: %s", "; ".join(f"rank {process.rank}: {silence.told}" for process, silence in told))
