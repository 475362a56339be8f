"""What a disturbed run left behind of each fault: in its log, in its checkpoints, and beside a clean run's losses.

Nothing is asked of the job itself: the lines are those that anybody reads with `penstock logs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from penstock_pipelines.faults import OrderedFault
from penstock_pipelines.logs import LogLine
from penstock_trainer.contract.events import StepEvent, parse_event

RestartedIn = Literal["not needed", "its writer", "ranks in place", "replica", "whole job", "ended"]

_CONTINUES = re.compile(r"continuing from step (\d+)|no checkpoint: beginning at step (0)")
_SAVED = re.compile(r"saved step (\d+) to ")
_IN_PLACE = re.compile(r"restart \d+ of \d+: ")
_REPLICA = re.compile(r"ended with status \d+; \S+ restarts")
_WHOLE_JOB = re.compile(r"the whole job restarts|was preempted")

_NOTICES: Mapping[str, tuple[str, ...]] = {
    "kill rank": (r"restart \d+ of \d+: .*",),
    "kill writer": (r"the writer of rank \d+ was lost.*",),
    "kill launcher": (r"\S+ ended with status \d+; .*", r".*no longer heard of.*"),
    "preempt": (r"SIGTERM: ranks have .*", r"the node of .* was preempted"),
    "restart-job": (r"SIGTERM: ranks have .*", r"fault injected: the whole job restarts.*"),
    "hang rank": (r"hung: .*", r"restart \d+ of \d+: .*"),
    "damage": (r"reading step \d+ of .* failed: .*", r".*falling back to the checkpoint before step \d+"),
    "out-of-memory": (r"exit code 1: .*",),
    "storage read-only": (r"step \d+ was not saved: .*", r"exit code 1: .*"),
    "storage truncate": (
        r"reading step \d+ of .* failed: .*",
        r".*falling back to the checkpoint before step \d+",
        r".* try \d of \d.*",
    ),
    "storage": (r"step \d+ was not saved.*", r".* try \d of \d.*"),
}
"""By the beginning of a fault's kind: the lines by which the job shows that it has noticed."""
_HARMLESS = ("storage slow", "storage wrong-date")
"""Whose answers are right."""
_MAY_PASS_UNNOTICED = ("delay-start", "kill writer")
"""A node that comes late is waited for, and a writer that has nothing left to write is not missed."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the training job."""

    at: datetime
    replica: str
    text: str
    step: StepEvent | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A step directory as it stands when the run is over."""

    step: int
    is_whole: bool
    samples_seen: int
    expected_samples: int
    keep_last: int
    """Newest that the run keeps; 0: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything that a row is made of."""

    lines: Sequence[Line]
    clean_losses: Mapping[int, float | None]
    saved: Sequence[Saved]
    succeeded: bool
    error: str = ""
    """Of a job that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one fault."""

    fault: str
    struck_at_step: int | None
    done: str
    """What was done to whom."""
    detected_by: str
    restarted_in: RestartedIn
    seconds_to_new_step: float | None
    steps_lost: int
    samples_off: int
    """Repeated or skipped."""
    losses: str
    verdict: str
    ok: bool

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def lines_of(entries: Iterable[LogLine]) -> list[Line]:
    """Log entries in the order of their times."""
    return sorted((_line(entry) for entry in entries), key=lambda line: line.at)


def losses_of(lines: Sequence[Line]) -> dict[int, float | None]:
    """The loss of each step that was logged, the last where it was logged again."""
    return {line.step.step: line.step.loss for line in lines if line.step}


def judge(
    faults: Sequence[OrderedFault], states: Sequence[Mapping[str, Any]], evidence: Evidence
) -> list[Row]:
    """A row for each fault. `states` are those of the control API."""
    claimed: set[int] = set()
    ordered = sorted(zip(faults, states, strict=True), key=lambda pair: pair[1]["struck_at"] or "~")
    expects_end = any(fault.is_permanent for fault in faults)
    made = []
    for index, (fault, state) in enumerate(ordered):
        later = [other["struck_at"] for _, other in ordered[index + 1 :] if other["struck_at"]]
        until = datetime.fromisoformat(later[0]) if later else None
        made.append(_row(fault, state, until, evidence, claimed, expects_end=expects_end))
    return made


def _row(
    fault: OrderedFault,
    state: Mapping[str, Any],
    until: datetime | None,
    evidence: Evidence,
    claimed: set[int],
    *,
    expects_end: bool,
) -> Row:
    if not state["struck_at"] or state["state"] == "failed":
        return _missed(fault, state)
    struck = datetime.fromisoformat(state["struck_at"])
    notice = _notice(fault, struck, evidence.lines, claimed)
    restarted_in, continued = _recovery(fault, struck, notice, evidence)
    before = [
        line.step.step
        for line in evidence.lines
        if line.step and line.at < (continued or notice or _at(struck)).at
    ]
    lost = before[-1] - _step_continued(continued) if continued and before else 0
    differing, compared = _compared(evidence, struck, until)
    samples_off = sum(abs(one.samples_seen - one.expected_samples) for one in evidence.saved if one.is_whole)
    problem = (
        _loss(evidence, differing, samples_off)
        or _unnoticed(fault, state, notice)
        or _wrong_end(evidence, expects_end=expects_end)
    )
    return Row(
        fault=fault.name,
        struck_at_step=state["step"],
        done=state["what"] + (f" ({state['requests']} struck)" if state["requests"] else ""),
        detected_by=_told(fault, notice, state),
        restarted_in=restarted_in,
        seconds_to_new_step=_seconds_to_new_step(evidence.lines, struck, continued),
        steps_lost=max(0, lost),  # a step between two log lines may have been saved
        samples_off=samples_off,
        losses=_losses(differing, compared),
        verdict=problem or ("ended, nothing committed was lost" if fault.is_permanent else "ok"),
        ok=not problem,
    )


def _missed(fault: OrderedFault, state: Mapping[str, Any]) -> Row:
    why = state["what"] or "the job ended before its time came"
    return Row(
        fault=fault.name,
        struck_at_step=state["step"],
        done="",
        detected_by="",
        restarted_in="not needed",
        seconds_to_new_step=None,
        steps_lost=0,
        samples_off=0,
        losses="",
        verdict=f"did not strike: {why}",
        ok=False,
    )


def _notice(fault: OrderedFault, struck: datetime, lines: Sequence[Line], claimed: set[int]) -> Line | None:
    """The first line after it that is of the fault's kind and tells of no other fault."""
    kind = next((kind for kind in _NOTICES if fault.kind.startswith(kind)), "")
    patterns = [re.compile(pattern, re.DOTALL) for pattern in _NOTICES.get(kind, ())]
    for index, line in enumerate(lines):
        if line.at < struck or index in claimed or line.step:
            continue
        if any(pattern.match(line.text) for pattern in patterns):
            claimed.add(index)
            return line
    return None


def _recovery(
    fault: OrderedFault, struck: datetime, notice: Line | None, evidence: Evidence
) -> tuple[RestartedIn, Line | None]:
    """What was started again, and the line that says from where the ranks went on."""
    if fault.is_permanent:
        return "ended", None
    if fault.kind == "kill writer":
        return "its writer", None
    restarts = fault.told["do"] != "delay-start" and (
        fault.told["do"] != "storage" or (notice is not None and _IN_PLACE.search(notice.text) is not None)
    )
    if not restarts:
        return "not needed", None
    after = [line for line in evidence.lines if line.at >= struck]
    continued = next((line for line in after if _CONTINUES.search(line.text)), None)
    between = [line.text for line in after if continued is None or line.at <= continued.at]
    kinds: tuple[tuple[RestartedIn, re.Pattern[str]], ...] = (
        ("whole job", _WHOLE_JOB),
        ("replica", _REPLICA),
        ("ranks in place", _IN_PLACE),
    )
    found = next((kind for kind, pattern in kinds if any(pattern.search(text) for text in between)), None)
    return found or "not needed", continued


def _losses(differing: int | None, compared: int) -> str:
    if differing is not None:
        return f"differ from step {differing}"
    return f"equal ({compared})" if compared else "none after it"


def _compared(evidence: Evidence, struck: datetime, until: datetime | None) -> tuple[int | None, int]:
    """The first step whose loss is another than the clean run's, and how many were compared."""
    compared = 0
    for line in evidence.lines:
        if line.step and line.at >= struck and (until is None or line.at < until):
            step = line.step
            compared += 1
            if step.step not in evidence.clean_losses or _hex(step.loss) != _hex(
                evidence.clean_losses[step.step]
            ):
                return step.step, compared
    return None, compared


def _loss(evidence: Evidence, differing: int | None, samples_off: int) -> str:
    """What of the run's results is not as it must be; empty when nothing is."""
    broken = sorted(_committed_but_lost(evidence))
    if broken:
        return f"committed and lost: steps {', '.join(map(str, broken))}"
    if differing is not None:
        return f"losses differ from step {differing}"
    return f"{samples_off} samples repeated or skipped" if samples_off else ""


def _unnoticed(fault: OrderedFault, state: Mapping[str, Any], notice: Line | None) -> str:
    """What a fault must leave behind and has not; empty when it has, or when it need not."""
    if fault.told["do"] == "storage" and not state["requests"]:
        return "struck no request; see its `match`"
    if notice is not None or fault.kind in _MAY_PASS_UNNOTICED:
        return ""
    if fault.is_permanent:
        return "nothing in the log says why the job ended"
    return "" if fault.told["do"] == "storage" else "nothing in the log shows that it was noticed"


def _wrong_end(evidence: Evidence, *, expects_end: bool) -> str:
    """What is wrong with how the run ended; empty when nothing is."""
    if expects_end:
        return "the run went on, and should have ended" if evidence.succeeded else ""
    if not evidence.succeeded:
        return f"the run failed: {evidence.error.splitlines()[0] if evidence.error else 'no reason given'}"
    missing = set(evidence.clean_losses) - set(losses_of(evidence.lines))
    return f"{len(missing)} steps were never logged" if missing else ""


def _committed_but_lost(evidence: Evidence) -> Iterator[int]:
    """Steps that the log says were saved, that retention keeps, and that are not whole."""
    saved = [int(match[1]) for line in evidence.lines if (match := _SAVED.search(line.text))]
    keep_last = min((one.keep_last for one in evidence.saved), default=0)
    whole = {one.step for one in evidence.saved if one.is_whole}
    newest = list(dict.fromkeys(reversed(saved)))
    for step in newest[: keep_last or None]:
        if step not in whole:
            yield step


def _seconds_to_new_step(lines: Sequence[Line], struck: datetime, continued: Line | None) -> float | None:
    since = continued.at if continued else struck
    first = next((line for line in lines if line.step and line.at > since), None)
    return (first.at - struck).total_seconds() if first else None


def _step_continued(continued: Line | None) -> int:
    match = _CONTINUES.search(continued.text) if continued else None
    return int(match[1] or match[2]) if match else 0


def _told(fault: OrderedFault, notice: Line | None, state: Mapping[str, Any]) -> str:
    if notice is not None:
        return f"{notice.replica}: {notice.text.splitlines()[0]}"
    if state["requests"] and fault.kind not in _HARMLESS:
        return "the storage client, which asked again"
    return "nobody: there was nothing to do"


def _at(moment: datetime) -> Line:
    return Line(moment, "", "", None)


def _hex(loss: float | None) -> str:
    return "None" if loss is None else loss.hex()


def _line(entry: LogLine) -> Line:
    event = parse_event(entry.payload)
    step = event if isinstance(event, StepEvent) else None
    return Line(datetime.fromisoformat(entry.timestamp), entry.replica, entry.text, step)
