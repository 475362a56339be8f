"""What a fault is, as it is posted to the control API: JSON, read strictly, every error with the path of its field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

ProcessHarm = Literal["kill", "hang", "out-of-memory"]
StorageHarm = Literal["slow", "refuse", "wrong-date", "reset", "truncate", "read-only"]
Direction = Literal["reads", "writes", "all"]

_REFUSALS = (408, 429, 500, 502, 503, 504)
"""What Cloud Storage documents as worth another try."""
_ONE_WAY: Mapping[str, Direction] = {"read-only": "writes", "truncate": "reads"}
_MOST = 1e9
_TRIGGERS = ("at_step", "at_start", "after_seconds")
_NO_TEXTS: Mapping[str, str] = {}
T = TypeVar("T")


class FaultError(ValueError):
    """A fault that cannot be ordered; the message names the field, what it is and what it may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """When a fault strikes; one of the three."""

    at_step: int | None = None
    """With the first line of the job that is a JSON object whose `step` is this or more."""
    at_start: bool = False
    after_seconds: float | None = None
    """Since the job runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFault:
    """SIGKILL, SIGSTOP, or no further memory for the processes that match."""

    harm: ProcessHarm
    when: Trigger
    command: re.Pattern[str]
    """Searched in the command line, its arguments joined by spaces."""
    environment: Mapping[str, str]
    """Variables that they have."""
    replica: str = ""
    """Empty: of any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """The node of a replica is taken away, and its disk with it."""

    when: Trigger
    replica: str
    notice_seconds: float = 0.0
    """Between SIGTERM to the container's first process and SIGKILL to all; 0: no SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRestart:
    """All replicas are ended and started again."""

    when: Trigger
    notice_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LateStart:
    """A replica's first start comes later than the others'."""

    when: Trigger
    replica: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFault:
    """Cloud Storage misbehaves for some requests, at most until the job ends."""

    harm: StorageHarm
    when: Trigger
    match: re.Pattern[str]
    """Searched in `bucket/object`; of a listing, its prefix stands for the object."""
    only: Direction = "all"
    requests: int | None = None
    """How many are struck; None: any number."""
    seconds: float | None = None
    """For how long; None: until the job ends."""
    status: int = 503
    delay_seconds: float = 1.0
    """Before a slow request is looked at."""
    hours: float = 0.0
    """By which the Date is off."""

    def strikes(self, target: str, *, is_write: bool) -> bool:
        """Whether it is about such a request."""
        is_of_its_kind = self.only == "all" or (self.only == "writes") == is_write
        return is_of_its_kind and self.match.search(target) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A stored object loses bits while nobody looks: its metadata stays, and the job is started again to read it."""

    when: Trigger
    how: Literal["flip", "cut"]
    """One bit in the middle changed, or the second half gone."""
    match: re.Pattern[str]
    """Searched in `bucket/object`; the newest that matches is damaged."""
    beside: re.Pattern[str] | None = None
    """Only an object at or below the directory of the newest one that matches this."""


Fault = ProcessFault | Preemption | JobRestart | LateStart | StorageFault | Damage


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Faults for one job: the first that starts with these labels."""

    labels: Mapping[str, str]
    faults: tuple[Fault, ...]


def parse_order(told: Any) -> Order:
    """`{"labels": {...}, "faults": [...]}` as a value. Raises FaultError."""
    fields = _Fields("", told)
    labels = fields.take("labels", _texts, _NO_TEXTS)
    listed = fields.take("faults", _listed)
    fields.end()
    return Order(
        labels=labels,
        faults=tuple(_fault(_Fields(f"faults[{index}]", each)) for index, each in enumerate(listed)),
    )


class _Fields:
    """The fields of one JSON object, each taken once."""

    def __init__(self, path: str, told: Any) -> None:
        if not isinstance(told, Mapping):
            raise FaultError(f"{path or 'the body'} is {told!r}; it must be an object with named fields.")
        self._path = path
        self._told = dict(told)
        self._known: list[str] = []

    def take(self, name: str, read: Callable[[Any], T], *default: T) -> T:
        """The field as a value; the default when it is missing."""
        self._known.append(name)
        if name not in self._told:
            if default:
                return default[0]
            raise FaultError(f"{self.at(name)} is missing; give it.")
        value = self._told.pop(name)
        try:
            return read(value)
        except FaultError as exc:
            raise FaultError(f"{self.at(name)} is {value!r}; {exc}.") from exc

    def at(self, name: str) -> str:
        """Path of a field."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether the field was given, and is not taken yet."""
        return name in self._told

    def hint(self, names: Sequence[str]) -> str:
        """What was given in place of one of these names; empty when nothing is near."""
        near = {name: difflib.get_close_matches(str(name), names, n=1) for name in self._told}
        return "".join(f" Is {name!r} to be {match[0]!r}?" for name, match in near.items() if match)

    def end(self) -> None:
        """Raise FaultError for what is left."""
        for name in self._told:
            nearest = difflib.get_close_matches(str(name), self._known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise FaultError(
                f"{self.at(str(name))} is not a field here.{hint} Fields: {', '.join(self._known)}."
            )


def _fault(fields: _Fields) -> Fault:
    do = fields.take("do", _one_of(*_MAKERS))
    made = _MAKERS[do](fields, do)
    fields.end()
    return made


def _process_fault(fields: _Fields, do: Any) -> Fault:
    return ProcessFault(
        harm=do,
        when=_trigger(fields),
        command=fields.take("command", _pattern),
        environment=fields.take("environment", _texts, _NO_TEXTS),
        replica=fields.take("replica", _replica, ""),
    )


def _preemption(fields: _Fields, _: str) -> Fault:
    return Preemption(
        when=_trigger(fields),
        replica=fields.take("replica", _replica),
        notice_seconds=fields.take("notice_seconds", _number_from(0), 0.0),
    )


def _job_restart(fields: _Fields, _: str) -> Fault:
    notice = fields.take("notice_seconds", _number_from(0), 0.0)
    return JobRestart(when=_trigger(fields), notice_seconds=notice)


def _late_start(fields: _Fields, _: str) -> Fault:
    fields.take("at_start", _true, True)
    return LateStart(
        when=Trigger(at_start=True),
        replica=fields.take("replica", _replica),
        seconds=fields.take("seconds", _number_from(0)),
    )


def _storage_fault(fields: _Fields, _: str) -> Fault:
    kind = fields.take("kind", _one_of(*get_args(StorageHarm)))
    special: dict[str, Any] = {}
    if kind == "refuse":
        special["status"] = fields.take("status", _one_of(*_REFUSALS), 503)
    if kind == "slow":
        special["delay_seconds"] = fields.take("delay_seconds", _number_from(0), 1.0)
    if kind == "wrong-date":
        special["hours"] = fields.take("hours", _number)
    if kind in _ONE_WAY:
        special["only"] = _ONE_WAY[kind]
    else:
        special["only"] = fields.take("only", _one_of(*get_args(Direction)), "all")
    return StorageFault(
        harm=kind,
        when=_trigger(fields),
        match=fields.take("match", _pattern, re.compile("")),
        requests=fields.take("requests", _whole, None),
        seconds=fields.take("seconds", _number_from(0), None),
        **special,
    )


def _damage(fields: _Fields, _: str) -> Fault:
    return Damage(
        when=_trigger(fields),
        how=fields.take("how", _one_of("flip", "cut")),
        match=fields.take("match", _pattern),
        beside=fields.take("beside", _pattern, None),
    )


_MAKERS: Mapping[str, Callable[[_Fields, str], Fault]] = {
    "kill": _process_fault,
    "hang": _process_fault,
    "out-of-memory": _process_fault,
    "preempt": _preemption,
    "restart-job": _job_restart,
    "delay-start": _late_start,
    "storage": _storage_fault,
    "damage": _damage,
}


def _trigger(fields: _Fields) -> Trigger:
    given = [name for name in _TRIGGERS if fields.has(name)]
    if len(given) != 1:
        raise FaultError(
            f"{fields.at('at_step')}, at_start and after_seconds: {', '.join(given) or 'none'} given; give one of the three."
            f"{fields.hint(_TRIGGERS)}"
        )
    return Trigger(
        at_step=fields.take("at_step", _whole, None),
        at_start=fields.take("at_start", _true, False),
        after_seconds=fields.take("after_seconds", _number_from(0), None),
    )


def _one_of(*allowed: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in allowed or isinstance(value, bool):
            nearest = difflib.get_close_matches(str(value), map(str, allowed), n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise FaultError(f"it must be one of {', '.join(map(str, allowed))}{hint}")
        return value

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        raise FaultError("it must be a number")
    return float(value)


def _number_from(least: float) -> Callable[[Any], Any]:
    def read(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value < _MOST:
            raise FaultError(f"it must be a number from {least:g} on")
        return float(value)

    return read


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FaultError("it must be a whole number from 1 on")
    return value


def _true(value: Any) -> bool:
    if value is not True:
        raise FaultError("it must be true")
    return True


def _replica(value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(r"workerpool\d+-\d+", value) is None:
        raise FaultError("it must be the name of a replica, such as 'workerpool1-0'")
    return value


def _pattern(value: Any) -> Any:
    if not isinstance(value, str):
        raise FaultError("it must be a regular expression")
    try:
        return re.compile(value)
    except re.error as exc:
        raise FaultError(f"it must be a regular expression, and is none: {exc}") from exc


def _texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value.values()):
        raise FaultError("it must be an object whose values are texts")
    return dict(value)


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise FaultError("it must be a list of at least one fault")
    return value
