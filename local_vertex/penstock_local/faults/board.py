"""The faults on order and what became of each: armed, struck, over, or missed because the job ended first."""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock_local.faults.damage import damage_newest
from penstock_local.faults.processes import strike_processes
from penstock_local.faults.spec import (
    Damage,
    Fault,
    JobRestart,
    LateStart,
    Order,
    Preemption,
    ProcessFault,
    StorageFault,
)
from penstock_local.jobs.processes import ManagedProcess
from penstock_local.storage import ObjectStore

logger = logging.getLogger(__name__)

State = Literal["armed", "struck", "over", "missed", "failed"]
"""missed: the job ended before its time came. failed: it could not strike, and `what` says why."""
_SEARCH_SECONDS = 60.0
"""For a process that is not there yet, such as a rank that is started again just now."""
_SEARCH_PAUSE_SECONDS = 0.02
_HARMLESS = ("slow", "wrong-date")
"""Storage faults that leave the answer to others."""


class Victim(Protocol):
    """A running job, as its faults see it. Methods may be called from any thread; none waits for the job."""

    def running(self, replica: str) -> Mapping[str, ManagedProcess]:
        """Replicas that run, by name: this one, or all for an empty name."""

    def preempt(self, replica: str, notice_seconds: float) -> bool:
        """Take the replica's node away; False when it does not run."""

    def restart(self, notice_seconds: float, meanwhile: Callable[[], None]) -> None:
        """End all replicas, call `meanwhile`, and start them again."""

    def tell(self, replica: str, line: str) -> None:
        """Write a line into the job's log; an empty name stands for the primary."""


@dataclass
class ArmedFault:
    """One fault and what became of it."""

    fault: Fault
    kind: str
    state: State = "armed"
    struck_at: str = ""
    """ISO 8601, UTC."""
    over_at: str = ""
    step: int | None = None
    """The last that the job had told."""
    what: str = ""
    """What was done to whom."""
    requests: int = 0
    """Struck, of a storage fault."""
    ends_at: float = float("inf")
    """time.monotonic() at which a storage fault is over."""

    def to_json(self) -> dict[str, Any]:
        """As the control API tells it."""
        told = ("kind", "state", "struck_at", "over_at", "step", "what", "requests")
        return {name: getattr(self, name) for name in told}


@dataclass
class _Plan:
    order: Order
    faults: list[ArmedFault]
    job: str = ""
    """The job that it is for, once that has started."""


class FaultBoard:
    """All faults of one stand-in. Thread-safe."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lock = threading.RLock()
        self._plans: list[_Plan] = []
        self._in_storage: list[ArmedFault] = []

    def arm(self, order: Order) -> None:
        """Keep an order for the next job that has its labels."""
        with self._lock:
            self._plans.append(_Plan(order, [ArmedFault(fault, kind_of(fault)) for fault in order.faults]))

    def to_json(self) -> list[dict[str, Any]]:
        """All orders in their order, with the state of each fault."""
        with self._lock:
            return [
                {
                    "labels": dict(plan.order.labels),
                    "job": plan.job,
                    "faults": [fault.to_json() for fault in plan.faults],
                }
                for plan in self._plans
            ]

    def for_job(self, name: str, labels: Mapping[str, str]) -> JobFaults:
        """The faults of a job that is about to start: of the first order for it that no job has taken."""
        with self._lock:
            for plan in self._plans:
                if not plan.job and plan.order.labels.items() <= labels.items():
                    plan.job = name
                    return JobFaults(self, plan.faults)
        return JobFaults(self, [])

    def storage_faults(self, target: str, *, is_write: bool) -> list[StorageFault]:
        """What strikes a request for `bucket/object`; counts it.

        Delays and dates add up; of the faults that decide the answer it is the first that was struck.
        """
        if not self._in_storage:
            return []
        struck: list[StorageFault] = []
        with self._lock:
            for armed in self._in_storage:
                fault = armed.fault
                assert isinstance(fault, StorageFault)
                if time.monotonic() > armed.ends_at:
                    self.end(armed)
                    continue
                is_decided = any(other.harm not in _HARMLESS for other in struck)
                if not fault.strikes(target, is_write=is_write) or (
                    is_decided and fault.harm not in _HARMLESS
                ):
                    continue
                armed.requests += 1
                struck.append(fault)
                if fault.requests is not None and armed.requests >= fault.requests:
                    self.end(armed)
        return struck

    def damage(self, fault: Damage) -> str:
        """Damage what a fault names; tells which object. Raises LookupError when nothing matches."""
        return damage_newest(self._objects, fault)

    def strike(self, armed: ArmedFault, step: int | None) -> bool:
        """Note that a fault strikes now; False for one that has before."""
        with self._lock:
            if armed.state != "armed":
                return False
            armed.state, armed.struck_at, armed.step = "struck", _now(), step
            if isinstance(armed.fault, StorageFault):
                if armed.fault.seconds is not None:
                    armed.ends_at = time.monotonic() + armed.fault.seconds
                self._in_storage = [*self._in_storage, armed]
            return True

    def end(self, armed: ArmedFault, what: str = "", *, state: State = "over") -> None:
        """Note what a fault has done, and that it does no more."""
        with self._lock:
            if armed.state in ("armed", "struck"):
                armed.state, armed.over_at = state, _now()
                armed.what = what or armed.what
            self._in_storage = [each for each in self._in_storage if each is not armed]


@dataclass
class JobFaults:
    """The faults of one job. Told of what the job does; strikes in threads of its own."""

    board: FaultBoard
    faults: list[ArmedFault]
    _victim: Victim | None = None
    _step: int | None = None
    _timers: list[threading.Timer] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def begin(self, victim: Victim) -> None:
        """The job is about to start its replicas for the first time."""
        self._victim = victim
        for armed in self.faults:
            when = armed.fault.when
            if isinstance(armed.fault, LateStart):
                continue
            if when.at_start:
                self._strike(armed)
            elif when.after_seconds is not None:
                timer = threading.Timer(when.after_seconds, self._strike, (armed,))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()

    def delay_of(self, replica: str) -> float:
        """Seconds by which this start of a replica has to wait."""
        for armed in self.faults:
            fault = armed.fault
            if isinstance(fault, LateStart) and fault.replica == replica and self.board.strike(armed, None):
                self._tell(armed, replica, f"{replica} starts {fault.seconds:g} s late")
                self.board.end(armed, armed.what)
                return fault.seconds
        return 0.0

    def saw(self, line: str) -> None:
        """A replica has written a line."""
        if not self.faults or not line.startswith("{") or '"step"' not in line:
            return
        step = _step_in(line)
        if step is None:
            return
        self._step = step
        for armed in self.faults:
            at_step = armed.fault.when.at_step
            if armed.state == "armed" and at_step is not None and step >= at_step:
                self._strike(armed)

    def end(self) -> None:
        """The job has ended."""
        self._ended.set()
        for timer in self._timers:
            timer.cancel()
        for armed in self.faults:
            self.board.end(armed, state="missed" if armed.state == "armed" else "over")

    def _strike(self, armed: ArmedFault) -> None:
        """In a thread: the caller may be the one that reads the victim's lines."""
        if self.board.strike(armed, self._step):
            threading.Thread(target=self._carry_out, args=(armed,), daemon=True).start()

    def _carry_out(self, armed: ArmedFault) -> None:
        assert self._victim is not None
        try:
            for replica, what in self._done_to(self._victim, armed):
                self._tell(armed, replica, what)
        except LookupError as exc:
            self.board.end(armed, f"could not strike: {exc.args[0]}", state="failed")
        else:
            if not isinstance(armed.fault, StorageFault):
                self.board.end(armed)

    def _done_to(self, victim: Victim, armed: ArmedFault) -> Iterator[tuple[str, str]]:
        """(replica, what was done to it). Raises LookupError when there is nothing to do it to."""
        fault = armed.fault
        if isinstance(fault, ProcessFault):
            yield from self._processes_struck(victim, fault)
        elif isinstance(fault, Preemption):
            notice = f"{fault.notice_seconds:g} s after SIGTERM" if fault.notice_seconds else "without notice"
            # Told first: nothing of the replica is there to tell it afterwards.
            yield fault.replica, f"the node of {fault.replica} is taken away {notice}"
            if not victim.preempt(fault.replica, fault.notice_seconds):
                raise LookupError(f"the job has no running replica {fault.replica}")
        elif isinstance(fault, JobRestart):
            yield "", f"the whole job restarts ({fault.notice_seconds:g} s of notice)"
            victim.restart(fault.notice_seconds, lambda: None)
        elif isinstance(fault, Damage):
            yield from self._damaged(victim, fault)
        elif isinstance(fault, StorageFault):
            yield "", _storage_told(fault)

    def _processes_struck(self, victim: Victim, fault: ProcessFault) -> Iterator[tuple[str, str]]:
        deadline = time.monotonic() + _SEARCH_SECONDS
        while not self._ended.is_set() and time.monotonic() < deadline:
            struck = [
                (name, what)
                for name, process in victim.running(fault.replica).items()
                for what in strike_processes(process, fault)
            ]
            if struck:
                yield from struck
                return
            time.sleep(_SEARCH_PAUSE_SECONDS)
        raise LookupError(
            f"no process of {fault.replica or 'any replica'} matched {fault.command.pattern!r} with {dict(fault.environment)}"
        )

    def _damaged(self, victim: Victim, fault: Damage) -> Iterator[tuple[str, str]]:
        done: list[str] = []
        failed: list[LookupError] = []
        is_done = threading.Event()

        def damage() -> None:
            try:
                done.append(self.board.damage(fault))
            except LookupError as exc:
                failed.append(exc)
            is_done.set()

        victim.restart(0.0, damage)
        while not is_done.wait(0.1):
            if self._ended.is_set():
                raise LookupError("the job ended first")
        if failed:
            raise failed[0]
        yield "", f"{done[0]}; the whole job restarts"

    def _tell(self, armed: ArmedFault, replica: str, what: str) -> None:
        armed.what = f"{armed.what}; {what}" if armed.what else what
        if self._victim is not None:
            self._victim.tell(replica, f"fault injected: {what}")


def kind_of(fault: Fault) -> str:
    """A fault in one or two words."""
    if isinstance(fault, ProcessFault):
        return fault.harm
    if isinstance(fault, StorageFault):
        return f"storage {fault.harm}"
    if isinstance(fault, Damage):
        return f"damage {fault.how}"
    names = {Preemption: "preempt", JobRestart: "restart-job", LateStart: "delay-start"}
    return names[type(fault)]


def _storage_told(fault: StorageFault) -> str:
    detail = {
        "slow": f"{fault.delay_seconds:g} s more for",
        "refuse": f"{fault.status} for",
        "wrong-date": f"a Date that is off by {fault.hours:g} h for",
        "reset": "connections cut in the middle of",
        "truncate": "half of what was asked for in",
        "read-only": "403 for",
    }[fault.harm]
    many = f"the next {fault.requests}" if fault.requests else "all"
    asked = {"reads": "reads", "writes": "writes", "all": "requests"}[fault.only]
    below = f" of {fault.match.pattern!r}" if fault.match.pattern else ""
    until = f" for {fault.seconds:g} s" if fault.seconds is not None else ""
    return f"storage: {detail} {many} {asked}{below}{until}"


def _step_in(line: str) -> int | None:
    try:
        told = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = told.get("step") if isinstance(told, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
