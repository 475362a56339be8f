"""Where a run's wall time went: what each attempt records of itself, and what the records of all come to.

    <root>/goodput/<attempt>.json    one object an attempt, which that attempt alone writes, over and over

    goodput = compute / total        compute  seconds of training steps whose result is in the model
                                     total    seconds of all attempts, and idle seconds between them
    tau*    = sqrt(2 s MTBF)         tau*     best seconds between two saves
                                     s        seconds that a save stops training
                                     MTBF     mean seconds between two interruptions of the job

The interval is Young's ("A first order approximation to the optimum checkpoint interval", 1974); what
penstock_components.planning.goodput expects of a run is what is measured here.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from penstock_trainer.contract.fields import ContractError, canonical_json, parse_json, require_version

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ASSUMED_MTBF_SECONDS = 8 * 3600.0
"""What an interval is reckoned from while no interruption was seen. Meta saw 7.9 h for jobs of 1,024 GPUs (HPCA 2025)."""

Category = Literal["startup", "restore", "compute", "blocked_by_saving", "evaluation", "export", "other"]
AttemptOutcome = Literal["done", "preempted", "retryable", "failed"]
_ENDS_A_JOB: tuple[AttemptOutcome, ...] = ("done", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSeconds:
    """Wall time of rank 0 since its process started; every moment is in one of these."""

    startup: float = 0.0
    """From the start of the process to the first step, but for `restore`: imports, meeting the others, data, model."""
    restore: float = 0.0
    """Reading checkpoints."""
    compute: float = 0.0
    """The training loop, waits for data included, but for what is below."""
    rolled_back: float = 0.0
    """The same of steps that this attempt itself undid, by going back to a checkpoint."""
    blocked_by_saving: float = 0.0
    """Training stood still for a save, or for one before it that was still being written."""
    evaluation: float = 0.0
    export: float = 0.0
    other: float = 0.0
    """After the last step, such as leaving the other ranks."""

    @property
    def total(self) -> float:
        """Of all."""
        return math.fsum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTimes:
    """What saving took; seconds are of all saves together."""

    taken: int = 0
    """Saves for which training stood still."""
    stall_seconds: float = 0.0
    """That it stood still for them; waits for an earlier save are not in it."""
    committed: int = 0
    """Of those taken, how many became checkpoints."""
    write_seconds: float = 0.0
    """From their beginning to their commit, of those committed."""

    @property
    def mean_stall_seconds(self) -> float | None:
        """Of one save; None while there is none."""
        return self.stall_seconds / self.taken if self.taken else None

    @property
    def mean_write_seconds(self) -> float | None:
        """Of one that was committed; None while there is none."""
        return self.write_seconds / self.committed if self.committed else None

    def __add__(self, other: SaveTimes) -> SaveTimes:
        return SaveTimes(
            taken=self.taken + other.taken,
            stall_seconds=self.stall_seconds + other.stall_seconds,
            committed=self.committed + other.committed,
            write_seconds=self.write_seconds + other.write_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How long an attempt had computed when a step was done."""

    step: int
    compute_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """What one attempt tells of itself. Points in time are seconds since the epoch, by the clock of its primary.

    That clock is read once, when the process starts to record: durations do not follow its adjustments.
    """

    format_version: int
    attempt: str
    fencing_token: int
    """Attempts of one root in their order."""
    world_size: int
    num_nodes: int
    save_interval: int
    """Steps between two saves, as configured."""
    started_at: float
    """Of the process, before its imports."""
    updated_at: float
    """Of this record: what a killed attempt did after it is not known."""
    first_step_at: float | None = None
    """When its first step began."""
    ended_at: float | None = None
    """None: it goes on, or was killed."""
    outcome: AttemptOutcome | None = None
    resumed_from: int | None = None
    """The step from which it trained on, the earliest where it rolled back; None: it did not get so far."""
    last_step: int | None = None
    """Done."""
    committed_step: int | None = None
    """Its newest that became a checkpoint."""
    seconds: AttemptSeconds = AttemptSeconds()
    saves: SaveTimes = SaveTimes()
    marks: tuple[Mark, ...] = ()
    """At steps that were saved, in their order; some of the older ones may be left out."""

    def __post_init__(self) -> None:
        require_version(
            self.format_version, FORMAT_VERSION, "goodput record", "use a penstock as new as its writer"
        )

    def compute_until(self, step: int) -> float:
        """Seconds of `seconds.compute` that went into the steps up to this one; between marks, steps count alike."""
        if self.resumed_from is None or self.last_step is None or step <= self.resumed_from:
            return 0.0
        if step >= self.last_step:
            return self.seconds.compute
        steps = [self.resumed_from, *(mark.step for mark in self.marks), self.last_step]
        spent = [0.0, *(mark.compute_seconds for mark in self.marks), self.seconds.compute]
        after = bisect_left(steps, step)
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return spent[after - 1] + share * (spent[after] - spent[after - 1])

    @property
    def known_until(self) -> float:
        """Its end, or where its last record leaves off."""
        return self.updated_at if self.ended_at is None else self.ended_at

    @property
    def steps_trained(self) -> int:
        """That `seconds.compute` is of."""
        return (
            0 if self.resumed_from is None or self.last_step is None else self.last_step - self.resumed_from
        )

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> AttemptRecord:
        """Raises ContractError: not JSON, another format version, or a field that is missing or ill-typed."""
        return parse_json(cls, text, "the goodput record")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveInterval:
    """How often to save."""

    seconds: float
    """Of training between two saves."""
    steps: int
    """The same in steps, at least 1."""
    save_stall_seconds: float
    """The measured cost of a save that it follows from."""
    mtbf_seconds: float
    is_mtbf_assumed: bool
    """No interruption was seen: the MTBF is not this run's."""
    is_bound_by_writing: bool
    """It would be shorter, but a save takes this long to be written, and only one is at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """A run, as far as its attempts have recorded it. Seconds add up to `total_seconds`."""

    startup: float
    restore: float
    compute: float
    """Of steps whose result is in the model."""
    blocked_by_saving: float
    evaluation: float
    export: float
    other: float
    lost_work: float
    """Of steps that were done again, or are to be."""
    idle: float
    """Between attempts: until the loss was noticed, machines were there and processes started. What a killed attempt did
    after its last record is in it too."""
    attempts: int
    """That left a record."""
    unrecorded_attempts: int
    """Attempts between others that left no record; their time is idle, and what ended them is not known."""
    interruptions: int
    """Attempts that were lost (killed, preempted, or without their peers), not those that ended or failed by themselves."""
    restart_seconds: float | None
    """Mean from an interruption to the first new step, or to the next interruption; None while there was none."""
    overlap_seconds: float
    """Told by two attempts at once, and counted twice: their clocks differ, or an older one went on until it was fenced."""
    num_nodes: int
    """Of the newest attempt."""
    save_interval: int
    """Steps between two saves, as configured for the newest attempt."""
    step_seconds: float | None
    """Mean of `compute` and `lost_work`; None before the first step."""
    saves: SaveTimes

    @property
    def total_seconds(self) -> float:
        """From the first start to the last end. A pause after an attempt that was done or failed is not in it."""
        return math.fsum(seconds for _, seconds in self.parts())

    @property
    def share(self) -> float:
        """The goodput: from 0 to 1, and 0 when no time has passed."""
        total = self.total_seconds
        return self.compute / total if total else 0.0

    @property
    def mtbf_seconds(self) -> float | None:
        """Of the job: time of all attempts per interruption; None when none was seen, and the MTBF is not known."""
        return (self.total_seconds - self.idle) / self.interruptions if self.interruptions else None

    def parts(self) -> tuple[tuple[str, float], ...]:
        """Where the time went: what it is called and its seconds."""
        return (
            ("compute", self.compute),
            ("start-up", self.startup),
            ("restore", self.restore),
            ("blocked by saving", self.blocked_by_saving),
            ("lost work", self.lost_work),
            ("idle", self.idle),
            ("evaluation", self.evaluation),
            ("export", self.export),
            ("other", self.other),
        )

    def recommended_interval(
        self, *, assumed_mtbf_seconds: float = ASSUMED_MTBF_SECONDS
    ) -> SaveInterval | None:
        """The best interval by this run's own figures; None before the first save or step."""
        stall = self.saves.mean_stall_seconds
        if stall is None or not self.step_seconds:
            return None
        mtbf = self.mtbf_seconds
        best = best_interval_seconds(
            save_stall_seconds=stall, mtbf_seconds=mtbf if mtbf is not None else assumed_mtbf_seconds
        )
        least = self.saves.mean_write_seconds or 0.0
        seconds = max(best, least)
        return SaveInterval(
            seconds=seconds,
            steps=max(1, round(seconds / self.step_seconds)),
            save_stall_seconds=stall,
            mtbf_seconds=mtbf if mtbf is not None else assumed_mtbf_seconds,
            is_mtbf_assumed=mtbf is None,
            is_bound_by_writing=least > best,
        )

    def told(self) -> str:
        """For people, in one line."""
        parts = ", ".join(f"{name} {told_seconds(seconds)}" for name, seconds in self.parts() if seconds)
        return (
            f"goodput {self.share:.1%} of {told_seconds(self.total_seconds)} in {_count(self.attempts, 'attempt')}: "
            f"{parts}"
        )

    def told_interruptions(self) -> str:
        """What is known of losses, for people."""
        unrecorded = (
            f"; {_count(self.unrecorded_attempts, 'attempt')} left no record"
            if self.unrecorded_attempts
            else ""
        )
        if not self.interruptions or self.mtbf_seconds is None:
            return f"none seen{unrecorded}"
        restart = (
            ""
            if self.restart_seconds is None
            else f", {told_seconds(self.restart_seconds)} to the first new step"
        )
        return f"{self.interruptions}, MTBF of the job {told_seconds(self.mtbf_seconds)}{restart}{unrecorded}"

    def told_interval(self) -> str:
        """How often to save and what that follows from, for people."""
        best = self.recommended_interval()
        if best is None:
            return "not known: no save was measured"
        source = (
            f"no interruption was seen, and an MTBF of {told_seconds(best.mtbf_seconds)} is assumed"
            if best.is_mtbf_assumed
            else f"the job's MTBF was {told_seconds(best.mtbf_seconds)}"
        )
        bound = (
            f" and takes {told_seconds(best.seconds)} to be written, one at a time"
            if best.is_bound_by_writing
            else ""
        )
        return (
            f"save every {_count(best.steps, 'step')} ({told_seconds(best.seconds)}); it was every {self.save_interval:,}. "
            f"A save stalls training for {told_seconds(best.save_stall_seconds)}{bound}; {source}"
        )


def goodput_dir_uri(root_uri: str) -> str:
    """The directory of the records, without a trailing slash."""
    return f"{root_uri.rstrip('/')}/goodput"


def record_uri(root_uri: str, attempt: str) -> str:
    """The record of one attempt."""
    return f"{goodput_dir_uri(root_uri)}/{attempt}.json"


def best_interval_seconds(*, save_stall_seconds: float, mtbf_seconds: float) -> float:
    """Between two saves, for the highest goodput: tau* of Young 1974, to first order in tau/MTBF."""
    return math.sqrt(2 * save_stall_seconds * mtbf_seconds)


def readable_records(objects: Mapping[str, bytes]) -> list[AttemptRecord]:
    """The records among a directory's objects, given by URI; what is none is named in the log and left out."""
    records = []
    for uri, data in objects.items():
        try:
            records.append(AttemptRecord.from_json(data))
        except ContractError as exc:
            logger.warning("%s is left out of the goodput: %s", uri, exc)
    return records


def join_attempts(records: Sequence[AttemptRecord], *, is_over: bool = False) -> Goodput:
    """What the attempts of one root come to. Their order is that of their fencing tokens, whatever their clocks say.

    With `is_over` nothing of the run goes on: a newest attempt that told no end was killed, and what it had not saved is
    lost. Otherwise that attempt is taken to be at work. Raises ValueError for no record.
    """
    if not records:
        raise ValueError("there is no record to join; give those of at least one attempt.")
    ordered = sorted(records, key=lambda record: record.fencing_token)
    newest, useful = ordered[-1], _useful_seconds(ordered, is_over=is_over)
    lost = [_interrupted(record, is_newest=record is newest, is_over=is_over) for record in ordered]
    spent = math.fsum(record.seconds.compute + record.seconds.rolled_back for record in ordered)
    gaps = [_gap(before, after) for before, after in itertools.pairwise(ordered)]
    restarts = list(_restarts(ordered, lost))
    steps = sum(record.steps_trained for record in ordered)
    return Goodput(
        startup=math.fsum(record.seconds.startup for record in ordered),
        restore=math.fsum(record.seconds.restore for record in ordered),
        compute=useful,
        blocked_by_saving=math.fsum(record.seconds.blocked_by_saving for record in ordered),
        evaluation=math.fsum(record.seconds.evaluation for record in ordered),
        export=math.fsum(record.seconds.export for record in ordered),
        other=math.fsum(record.seconds.other for record in ordered),
        lost_work=max(0.0, spent - useful),
        idle=math.fsum(max(0.0, gap) for gap in gaps),
        attempts=len(ordered),
        unrecorded_attempts=newest.fencing_token - ordered[0].fencing_token + 1 - len(ordered),
        interruptions=sum(lost),
        restart_seconds=math.fsum(restarts) / len(restarts) if restarts else None,
        overlap_seconds=math.fsum(max(0.0, -gap) for gap in gaps),
        num_nodes=newest.num_nodes,
        save_interval=newest.save_interval,
        step_seconds=math.fsum(record.seconds.compute for record in ordered) / steps if steps else None,
        saves=sum((record.saves for record in ordered), start=SaveTimes()),
    )


def told_seconds(seconds: float) -> str:
    """A duration for people."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    for limit, unit, name in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def _useful_seconds(ordered: Sequence[AttemptRecord], *, is_over: bool) -> float:
    """Compute of the steps that no later attempt did again."""
    newest, useful, kept_to = ordered[-1], 0.0, math.inf
    if is_over and _interrupted(newest, is_newest=True, is_over=True) and newest.resumed_from is not None:
        kept_to = max(newest.resumed_from, newest.committed_step or 0)
    for record in reversed(ordered):
        useful += record.seconds.compute if kept_to == math.inf else record.compute_until(int(kept_to))
        if record.resumed_from is not None:
            kept_to = min(kept_to, record.resumed_from)
    return useful


def _interrupted(record: AttemptRecord, *, is_newest: bool, is_over: bool) -> bool:
    if record.outcome is None:
        return is_over or not is_newest
    return record.outcome not in _ENDS_A_JOB


def _gap(before: AttemptRecord, after: AttemptRecord) -> float:
    """Idle seconds; below 0 where the two overlap. After a job's own end nothing waits for its next attempt."""
    gap = after.started_at - before.known_until
    return min(gap, 0.0) if before.outcome in _ENDS_A_JOB else gap


def _restarts(ordered: Sequence[AttemptRecord], lost: Sequence[bool]) -> Iterator[float]:
    for (before, after), was_lost in zip(itertools.pairwise(ordered), lost, strict=False):
        if was_lost:
            reached = after.known_until if after.first_step_at is None else after.first_step_at
            yield max(0.0, reached - before.known_until)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
