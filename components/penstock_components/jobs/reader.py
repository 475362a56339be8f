"""Reads a message out of what a person wrote, and tells every fault of how it is written.

It is lenient where the meaning is plain, so that one fault is told once and what lies behind it is judged too.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

from penstock_components.jobs.findings import Case, Finding, in_case
from penstock_components.jobs.messages import Message
from penstock_components.jobs.misplaced import advice_on
from penstock_components.jobs.schema import Field, fields_of

M = TypeVar("M", bound=Message)

PLACEHOLDER = re.compile(r"\{\{\$|\{\{channel:")
"""What a compiled pipeline holds where a value is known only when it runs."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""As proto3's JSON writes numbers that JSON has not."""
_DURATION = re.compile(r"(-?)(\d{1,12})(?:\.(\d{1,9}))?s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(Generic[M]):
    """What a value says, and what is wrong with how it says it."""

    message: M
    findings: tuple[Finding, ...]
    unread: frozenset[str]
    """Paths of fields whose value could not be made out; they are at their default in `message`."""


def read(kind: type[M], value: object, *, case: Case) -> Reading[M]:
    """The message that `value` holds, as far as it can be made out. Raises nothing; all faults are findings."""
    reader = _Reader(case=case, root=kind)
    message = reader.message(kind, value, "")
    return Reading(message=message, findings=tuple(reader.findings), unread=frozenset(reader.unread))


@dataclass(slots=True)
class _Reader:
    """Collects what it finds while it walks a value."""

    case: Case
    root: type[Message]
    """Of the whole document: where a misplaced field belongs is told from there."""
    findings: list[Finding] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def message(self, kind: type[M], value: object, path: str) -> M:
        if not isinstance(value, Mapping):
            self._refuse(path, "message-expected", f"it is {_told(value)}.", _message_fix(kind, self.case))
            return kind()
        known = {spec.name: spec for spec in fields_of(kind)}
        given, strays = self._sort(kind, value, known, path)
        values = {}
        for name, (key, held) in given.items():
            if held is not None:
                values[name] = self._value(known[name], held, f"{path}.{key}".lstrip("."))
        self._report(kind, strays, known, values, path)
        return self._one_of(kind, values, path)

    def _sort(
        self, kind: type[Message], value: Mapping[Any, object], known: Mapping[str, Field], path: str
    ) -> tuple[dict[str, tuple[str, object]], dict[str, object]]:
        """By field name the key under which it stands and its value; and what belongs to no field."""
        given: dict[str, tuple[str, object]] = {}
        strays: dict[str, object] = {}
        for key, held in value.items():
            name = _snake(str(key))
            if name in kind.OUTPUT_ONLY:
                continue
            if name not in known or not isinstance(key, str):
                strays[str(key)] = held
                continue
            right = in_case(name, self.case)
            if key != right:
                takes = (
                    "Google's Python clients and CustomTrainingJobOp take snake_case only"
                    if self.case == "snake"
                    else "the rest of this document is camelCase"
                )
                self._add(
                    f"{path}.{name}",
                    "field-case",
                    f"the field is written {key!r}; {takes}.",
                    f"Write {right!r}.",
                    is_error=self.case == "snake" or key != name,
                )
            if name in given:
                self._refuse(
                    f"{path}.{name}", "field-twice", f"the field stands twice, as {key!r} too.", "Keep one."
                )
                continue
            given[name] = (name, held)
        return given, strays

    def _report(
        self,
        kind: type[Message],
        strays: Mapping[str, object],
        known: Mapping[str, Field],
        values: dict[str, Any],
        path: str,
    ) -> None:
        """Tell of keys that are no fields; what is plainly meant is read as such."""
        inner: dict[str, dict[str, object]] = {}
        for key, held in strays.items():
            name = _snake(key)
            at = f"{path}.{name}".lstrip(".")
            advised = advice_on(name)
            owners = (
                []
                if advised
                else [
                    spec
                    for spec in known.values()
                    if spec.is_message
                    and not spec.is_repeated
                    and name in {f.name for f in fields_of(spec.type)}
                ]
            )
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if advised is not None:
                self._refuse(at, advised.rule, advised.reason, advised.fix)
                if advised.means in known and advised.means not in values:
                    self.unread.add(f"{path}.{advised.means}".lstrip("."))
            elif len(owners) >= 1 and not (nearest and name not in _names_below(owners[0])):
                inner.setdefault(owners[0].name, {})[key] = held
            elif nearest:
                right = in_case(nearest[0], self.case)
                self._refuse(
                    at, "unknown-field", f"{kind.__name__} has no field {key!r}.", f"Write {right!r}."
                )
                if nearest[0] not in values and held is not None:
                    values[nearest[0]] = self._value(
                        known[nearest[0]], held, f"{path}.{nearest[0]}".lstrip(".")
                    )
            else:
                self._refuse(
                    at,
                    "unknown-field",
                    f"{kind.__name__} has no field {key!r}.",
                    _elsewhere(self.root, name, known, self.case),
                )
        for owner, fields in inner.items():
            names = ", ".join(fields)
            at = f"{path}.{_snake(next(iter(fields)))}".lstrip(".")
            verb = "is a field" if len(fields) == 1 else "are fields"
            right = in_case(owner, self.case)
            self._refuse(
                at,
                "field-level",
                f"{names} {verb} of {right}, not of {kind.__name__}.",
                f"Write {right}: {{{names}}}.",
            )
            if owner not in values:
                values[owner] = self.message(known[owner].type, fields, f"{path}.{owner}".lstrip("."))

    def _one_of(self, kind: type[M], values: dict[str, Any], path: str) -> M:
        chosen = [name for name in kind.ONE_OF if values.get(name) is not None]
        if len(chosen) > 1:
            told = " and ".join(in_case(name, self.case) for name in chosen)
            self._refuse(path, "one-of", f"{told} exclude each other.", "Keep one.")
            values |= dict.fromkeys(chosen[1:])
        return kind(**values)

    def _value(self, spec: Field, held: object, path: str) -> Any:
        if spec.is_map:
            return self._map(held, path)
        if not spec.is_repeated:
            return self._one(spec, held, path)
        if not isinstance(held, (list, tuple)):
            self._refuse(
                path, "list-expected", f"it is {_told(held)}; the field is a list.", "Put it into [ ]."
            )
            held = [held]
        return tuple(self._one(spec, each, f"{path}[{index}]") for index, each in enumerate(held))

    def _map(self, held: object, path: str) -> Mapping[str, str]:
        if not isinstance(held, Mapping):
            self._refuse(
                path,
                "map-expected",
                f"it is {_told(held)}; the field maps texts to texts.",
                "Write {name: value}.",
            )
            return {}
        text = Field("", str, False, False, False, "", {}, False)
        return {str(key): self._one(text, value, f"{path}[{key!r}]") for key, value in held.items()}

    def _one(self, spec: Field, held: object, path: str) -> Any:
        if spec.is_message:
            return self.message(spec.type, held, path)
        if spec.type is not str and isinstance(held, str) and PLACEHOLDER.search(held):
            return self._unreadable(
                spec, path, "placeholder",
                f"it is a placeholder of the pipeline, {held!r}: the value would be known only when the pipeline runs, and "
                "reach the API as text.",
                "Decide it when the pipeline is compiled; make one pipeline for each value.",
            )  # fmt: skip
        if spec.values:
            return self._enum(spec, held, path)
        read_as = {
            str: self._text,
            bool: self._bool,
            int: self._int,
            float: self._float,
            timedelta: self._duration,
        }
        return read_as[spec.type](spec, held, path)

    def _enum(self, spec: Field, held: object, path: str) -> str:
        names = {number: name for name, number in spec.values.items()}
        if isinstance(held, (int, float)) and not isinstance(held, bool) and held in names:
            held = names[int(held)]  # a compiled pipeline has floats only
        if isinstance(held, str) and (held in spec.values or not held):
            return "" if not held or spec.values[held] == 0 else held
        allowed = [name for name, number in spec.values.items() if number]
        if isinstance(held, str):
            if PLACEHOLDER.search(held):
                return str(
                    self._unreadable(
                        spec, path, "placeholder",
                        f"it is a placeholder of the pipeline, {held!r}; machines are decided when the pipeline is compiled.",
                        "Give the name itself.",
                    )
                )  # fmt: skip
            nearest = difflib.get_close_matches(held.upper().replace("-", "_"), allowed, n=1)
            if nearest:
                self._refuse(path, "enum", f"{held!r} is none of its values.", f"Write {nearest[0]}.")
                return nearest[0]
        return str(
            self._unreadable(
                spec, path, "enum", f"it is {_told(held)}.", f"Write one of {', '.join(allowed)}."
            )
        )

    def _text(self, _spec: Field, held: object, path: str) -> str:
        if isinstance(held, str):
            return held
        if isinstance(held, (Mapping, list)):
            return str(
                self._unreadable(
                    _spec,
                    path,
                    "text-expected",
                    f"it is {_told(held)}; the field is text.",
                    "Write one text.",
                )
            )
        told = {True: "true", False: "false"}.get(held, str(held)) if isinstance(held, bool) else str(held)
        self._refuse(
            path, "text-expected", f"it is {_told(held)}; the field is text.", f'Quote it: "{told}".'
        )
        return told

    def _bool(self, spec: Field, held: object, path: str) -> bool:
        if isinstance(held, bool):
            return held
        meant = {"true": True, "false": False}.get(str(held).lower())
        if meant is None:
            return bool(
                self._unreadable(spec, path, "bool-expected", f"it is {_told(held)}.", "Write true or false.")
            )
        self._refuse(
            path, "bool-expected", f"it is {_told(held)}.", f"Write {str(meant).lower()}, without quotes."
        )
        return meant

    def _int(self, spec: Field, held: object, path: str) -> int:
        if isinstance(held, str) and re.fullmatch(r"-?\d{1,19}", held):
            if not (spec.is_int64 and self.case == "camel"):  # proto3's JSON has 64-bit integers as texts
                self._add(
                    path,
                    "number-expected",
                    f"it is the text {held!r}.",
                    f"Write {held}, without quotes.",
                    is_error=False,
                )
            held = int(held)
        if isinstance(held, float) and held.is_integer():  # as in a compiled pipeline
            held = int(held)
        if not isinstance(held, int) or isinstance(held, bool):
            cut = ", and Google's client would cut it off without a word" if isinstance(held, float) else ""
            return int(
                self._unreadable(
                    spec,
                    path,
                    "number-expected",
                    f"it is {_told(held)}, no whole number{cut}.",
                    "Write a whole number.",
                )
            )
        bits = 63 if spec.is_int64 else 31
        if not -(2**bits) <= held < 2**bits:
            return int(
                self._unreadable(
                    spec,
                    path,
                    "number-expected",
                    f"{held} does not fit {bits + 1} bits.",
                    "Write a smaller number.",
                )
            )
        return held

    def _float(self, spec: Field, held: object, path: str) -> float:
        if isinstance(held, str) and held in NOT_FINITE:
            return NOT_FINITE[held]
        if isinstance(held, (int, float)) and not isinstance(held, bool):
            return float(held)
        return float(
            self._unreadable(spec, path, "number-expected", f"it is {_told(held)}.", "Write a number.")
        )

    def _duration(self, spec: Field, held: object, path: str) -> timedelta | None:
        if isinstance(held, timedelta):
            return held
        if isinstance(held, Mapping) and set(held) <= {"seconds", "nanos"}:
            seconds, nanos = held.get("seconds", 0), held.get("nanos", 0)
            if isinstance(seconds, int) and isinstance(nanos, int) and nanos % 1000 == 0:
                return timedelta(seconds=seconds, microseconds=nanos // 1000)
        match = _DURATION.fullmatch(held) if isinstance(held, str) else None
        if match is not None and not (match[3] or "")[6:].strip("0"):
            micros = int(match[2]) * 10**6 + int((match[3] or "0").ljust(6, "0")[:6])
            return timedelta(microseconds=-micros if match[1] else micros)
        fix = 'Write seconds with an s, such as "3600s" or "0.5s"; finer than a microsecond it cannot be.'
        if isinstance(held, (int, float)) and not isinstance(held, bool):
            self._refuse(
                path, "duration-expected", f"it is {_told(held)}; a duration is text.", f'Write "{held}s".'
            )
            return timedelta(seconds=held)
        self._unreadable(spec, path, "duration-expected", f"it is {_told(held)}.", fix)
        return None

    def _unreadable(self, spec: Field, path: str, rule: str, reason: str, fix: str) -> Any:
        self._refuse(path, rule, reason, fix)
        self.unread.add(path)
        return spec.type() if spec.is_repeated or spec.default is None else spec.default

    def _refuse(self, path: str, rule: str, reason: str, fix: str) -> None:
        self._add(path, rule, reason, fix, is_error=True)

    def _add(self, path: str, rule: str, reason: str, fix: str, *, is_error: bool) -> None:
        self.findings.append(
            Finding(
                path=path.lstrip("."),
                rule=rule,
                reason=reason,
                fix=fix,
                severity="error" if is_error else "warning",
            )
        )


def _names_below(spec: Field) -> set[str]:
    return {below.name for below in fields_of(spec.type)}


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f"_{match[1].lower()}", key)


def _told(value: object) -> str:
    """What stands there, for people."""
    if isinstance(value, (Mapping, list)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    kind = "the number" if isinstance(value, (int, float)) else "the text"
    return f"{kind} {value!r}" if len(repr(value)) < 60 else f"{kind} {repr(value)[:57]}..."


def _message_fix(kind: type[Message], case: Case) -> str:
    return f"Write a mapping with {', '.join(in_case(spec.name, case) for spec in fields_of(kind))}."


def _elsewhere(root: type[Message], name: str, known: Mapping[str, Field], case: Case) -> str:
    """Where a field of that name is, else what there is here."""
    homes = list(_homes(root, name, ""))
    if homes:
        return f"It is a field of {' or '.join(f'{owner}: {in_case(path, case)}' for owner, path in homes)}."
    return f"It has {', '.join(in_case(each, case) for each in known)}."


def _homes(kind: type[Message], name: str, path: str) -> Iterator[tuple[str, str]]:
    for spec in fields_of(kind):
        at = f"{path}.{spec.name}".lstrip(".")
        if spec.name == name:
            yield kind.__name__, at
        if spec.is_message:
            yield from _homes(spec.type, name, f"{at}[]" if spec.is_repeated else at)
