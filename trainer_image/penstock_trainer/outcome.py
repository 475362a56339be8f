"""How ranks ended, and what that makes of the job's exit code.

Vertex restarts a replica or retries the job after 134 and gives up after most other codes, so the code says whether
another try can help. torchrun's does not (1 for a rank that was killed), and a rank's own does not either: survivors
of a lost peer end with an ordinary exception.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock_trainer.heartbeat import Pulse

Outcome = Literal["done", "preempted", "retryable", "failed"]

RETRYABLE = 134
"""SIGABRT by the shell's convention, which Vertex takes for possibly transient (as it does 139)."""


ThreadState = Literal["stopped", "running", "waiting"]
"""Of a rank's main thread: stopped by a signal, computing (or polling a device), or waiting for something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """What was last heard of a rank of which nothing is heard any more."""

    pulse: Pulse
    main_thread: ThreadState
    since: float
    """Of the last beat, in seconds since the epoch by the clock of its node."""

    @property
    def told(self) -> str:
        """For people."""
        last = self.pulse
        return (
            f"no sign of life for {last.age_seconds:.0f} s in {last.phase} step {last.step}; "
            f"its main thread is {self.main_thread}"
        )

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts ranks of one world by how far they have come: the first is what the others wait for.

        Ranks that wait in the same step as the one that hangs are told from it by their beats since, and by a process
        that is stopped; where both say nothing, by who was heard of last.
        """
        return (self.pulse.step, self.main_thread != "stopped", self.pulse.beats, self.since)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    outcome: Outcome
    reported: bool
    """The rank said so itself. Otherwise it is concluded from how the process ended."""
    stopped: bool
    """The launcher had sent SIGKILL before."""
    ended_at: float
    """Seconds since the epoch by the clock of its node."""
    error: str = ""
    """One line; empty when done."""
    traceback: str = ""
    step: int | None = None
    silence: Silence | None = None
    """Why the launcher gave the rank up, which then told nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnd:
    """The end of one node's ranks in one round."""

    ranks: tuple[RankEnd, ...]
    told_to_stop: bool
    """Its launcher had received SIGTERM or SIGINT."""
    unsaved: str = ""
    """Why the last state of a script's checkpoint directory is not in storage; empty when it is, or none was named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What every launcher of a job exits with or, instead, that all start their ranks again; and why."""

    exit_code: int
    reason: str
    """The first cause, with its traceback; consequences are left out."""
    restart: bool = False
    """No launcher exits: the plan of the next round is there."""


def read_end(
    rank: int,
    returncode: int,
    result_file: Path | None,
    *,
    stopped: bool,
    ended_at: float,
    silence: Silence | None = None,
) -> RankEnd:
    """The end of a process from its return code (negative: the signal) and from what it wrote.

    `result_file` is None for a script that reports nothing; then exit code 0 means done. A file that does not parse is
    taken for none: the rank was killed while it wrote. `silence` is that of a rank that the launcher gave up.
    """
    told = _read_result(result_file)
    if told is not None:
        return RankEnd(
            rank=rank,
            outcome=told["outcome"],
            reported=True,
            stopped=stopped,
            ended_at=ended_at,
            error=str(told.get("error") or ""),
            traceback=str(told.get("traceback") or ""),
            step=told.get("step"),
        )
    outcome, error = _conclude(returncode, reports=result_file is not None)
    if silence is not None:
        outcome, error = "retryable", silence.told
    return RankEnd(
        rank=rank,
        outcome=outcome,
        reported=False,
        stopped=stopped,
        ended_at=ended_at,
        error=error,
        step=silence.pulse.step if silence else None,
        silence=silence,
    )


def decide(ends: Sequence[RankEnd], lost_nodes: Sequence[int] = ()) -> Verdict:
    """The job's verdict from the ends of all ranks that are known and the nodes whose launchers vanished.

    The first cause decides, not what followed from it: a rank that reports a failure of its own, else the first that
    ended without a report (its peers then see a broken connection), else the one behind of those that hung, else the
    first that reports a broken collective, else a lost node, else what the launcher itself stopped.
    """
    cause = _first_cause(ends)
    if lost_nodes and (cause is None or _blame(cause) > _LOST_NODE):
        nodes = ", ".join(map(str, lost_nodes))
        return Verdict(exit_code=RETRYABLE, reason=f"the launcher of node {nodes} is no longer heard of")
    if cause is None:
        return Verdict(exit_code=0, reason=f"all {len(ends)} ranks are done")
    if cause.silence is not None:
        return Verdict(exit_code=RETRYABLE, reason=f"rank {cause.rank} hung: {cause.error}")
    at = f" at step {cause.step}" if cause.step is not None else ""
    trace = f"\n{cause.traceback.rstrip()}" if cause.traceback else ""
    return Verdict(
        exit_code=1 if cause.outcome == "failed" else RETRYABLE,
        reason=f"rank {cause.rank} {_VERBS[cause.outcome]}{at}: {cause.error or 'no reason given'}{trace}",
    )


def mends_in_place(ends: Sequence[RankEnd], *, reports: bool) -> bool:
    """Whether the same ranks, started again on the same nodes, may go on where these ended.

    A rank that was lost, or whose collective failed, is worth another try; a failure that a rank reported itself would
    come again. A script that reports nothing (`reports` is False) does not say which it was: then every bad end is
    worth one, as under torchrun. After a preemption the node is about to vanish.
    """
    cause = _first_cause(ends)
    if cause is None or any(end.outcome == "preempted" for end in ends):
        return False
    return cause.outcome == "retryable" or not reports


_LOST_NODE = 4
_VERBS = {"failed": "failed", "retryable": "was lost or lost its peers", "preempted": "was preempted"}


def _first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    bad = [end for end in ends if end.outcome != "done"]
    return min(bad, key=_order, default=None)


def _order(end: RankEnd) -> tuple[float, ...]:
    return (_blame(end), *(end.silence.order if end.silence else (end.ended_at,)))


def _blame(end: RankEnd) -> int:
    """Lower is closer to the cause."""
    if end.reported:
        return {"failed": 0, "retryable": 3}.get(end.outcome, 6)
    if end.silence is not None:
        return 2
    return 5 if end.stopped else 1


def _conclude(returncode: int, *, reports: bool) -> tuple[Outcome, str]:
    if returncode < 0:
        return "retryable", f"died by signal {-returncode} ({signal.strsignal(-returncode)})"
    if returncode > 0:
        return "failed", f"exit code {returncode}{' without a report' if reports else ''}"
    return ("failed", "exit code 0 without a report") if reports else ("done", "")


def _read_result(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    try:
        told = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("outcome") not in get_args(Outcome):
        return None
    return told
