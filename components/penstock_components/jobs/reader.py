"""Reads a message out of what a person wrote, and tells every fault of how it is written.

It is lenient where the meaning is plain, so that one fault is told once and what lies behind it is judged too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from penstock_components.jobs.findings import Case, Finding, in_case, quoted
from penstock_components.jobs.messages import Message
from penstock_components.jobs.misplaced import advice_on
from penstock_components.jobs.scalars import PLACEHOLDER, nearest, read_scalar, told
from penstock_components.jobs.schema import Field, fields_of, snake_name

__all__ = ["PLACEHOLDER", "Reading", "read"]

M = TypeVar("M", bound=Message)

_DEEPEST = 100
"""Messages within each other, as protobuf's own reader of JSON has it."""
_LONGEST_KEY = 100
"""Characters; no field's name has half of them."""
_FOR_SHELLS = re.compile(r"""["'$`|&;<>\\(){}\[\]]""")
"""What a shell would take a line apart by, or put into it."""
_TEXT = Field("", str, False, False, False, "", {}, False)
"""What a map holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(Generic[M]):
    """What a value says, and what is wrong with how it says it."""

    message: M
    findings: tuple[Finding, ...]
    unread: frozenset[str]
    """Paths of fields whose value could not be made out; they are at their default in `message`."""


def read(kind: type[M], value: object, *, case: Case) -> Reading[M]:
    """The message that `value` holds, as far as it can be made out. Raises nothing; all faults are findings."""
    reader = _Reader(case=case, root=kind, is_returned=_is_returned(kind, value))
    message = reader.message(kind, value, "")
    return Reading(message=message, findings=tuple(reader.findings), unread=frozenset(reader.unread))


@dataclass(slots=True)
class _Reader:
    """Collects what it finds while it walks a value."""

    case: Case
    root: type[Message]
    """Of the whole document: where a misplaced field belongs is told from there."""
    is_returned: bool
    """Whether Google's client wrote what is read: a document that the API returned, or a message whose enumerations are
    numbers, as in what GCPC's serialize_parameters makes for a tuning job."""
    findings: list[Finding] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    level: int = 0

    def message(self, kind: type[M], value: object, path: str) -> M:
        if not isinstance(value, Mapping):
            self._cannot(path, "message-expected", f"it is {told(value)}.", self._form(kind))
            return kind()
        if self.level >= _DEEPEST:
            self._cannot(path, "too-deep", f"it lies within {_DEEPEST} messages.", "Nest fewer.")
            return kind()
        known = {spec.name: spec for spec in fields_of(kind)}
        given, strays = self._sort(kind, value, known, path)
        around = self.level, self.is_returned
        self.level += 1
        self.is_returned |= any(
            known[name].values and isinstance(held, (int, float)) for name, held in given.items()
        )
        values = {}
        for name, held in given.items():
            if held is not None:
                values[name] = self._value(known[name], held, _below(path, name))
        self._report(kind, strays, known, values, path)
        self.level, self.is_returned = around
        return self._one_of(kind, values, path)

    def _sort(
        self, kind: type[Message], value: Mapping[Any, object], known: Mapping[str, Field], path: str
    ) -> tuple[dict[str, object], dict[str, object]]:
        """Values by field name; and by key what belongs to no field."""
        given: dict[str, object] = {}
        strays: dict[str, object] = {}
        for key, held in value.items():
            name = snake_name(key) if isinstance(key, str) and len(key) <= _LONGEST_KEY else ""
            if name in kind.OUTPUT_ONLY:
                continue
            if name not in known:
                strays[_key(key)] = held
                continue
            right = in_case(name, self.case)
            if key != right:
                takes = (
                    "Google's Python clients and CustomTrainingJobOp take snake_case only"
                    if self.case == "snake"
                    else "the rest of this document is camelCase"
                )
                self._add(
                    _below(path, name),
                    "field-case",
                    f"the field is written {key!r}; {takes}.",
                    f"Write {right!r}.",
                    is_error=self.case == "snake" or key != name,
                )
            if name in given:
                self._refuse(
                    _below(path, name), "field-twice", f"the field stands twice, as {key!r} too.", "Keep one."
                )
                continue
            given[name] = held
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
            name = snake_name(key)
            at = _below(path, name)
            advised = advice_on(name)
            around = [spec.name for spec in known.values() if not spec.is_repeated and _has_field(spec, name)]
            near = nearest(name, list(known), cutoff=0.75)
            if advised is not None:
                self._refuse(at, advised.rule, advised.reason, advised.fix)
                if advised.means in known and advised.means not in values:
                    self.unread.add(_below(path, advised.means))
            elif around:
                inner.setdefault(around[0], {})[key] = held
            elif near is not None:
                self._refuse(
                    at,
                    "unknown-field",
                    f"{kind.__name__} has no field {quoted(key)}.",
                    f"Write {in_case(near, self.case)!r}.",
                )
                if near not in values and held is not None:
                    values[near] = self._value(known[near], held, _below(path, near))
            else:
                self._refuse(
                    at,
                    "unknown-field",
                    f"{kind.__name__} has no field {quoted(key)}.",
                    _elsewhere(self.root, name, known, self.case),
                )
        for owner, fields in inner.items():
            names = ", ".join(fields)
            at = _below(path, snake_name(next(iter(fields))))
            verb = "is a field" if len(fields) == 1 else "are fields"
            right = in_case(owner, self.case)
            self._refuse(
                at,
                "field-level",
                f"{names} {verb} of {right}, not of {kind.__name__}.",
                f"Write {right}: {{{names}}}.",
            )
            meant = self.message(known[owner].type, fields, _below(path, owner))
            values[owner] = _filled(values[owner], meant) if owner in values else meant

    def _one_of(self, kind: type[M], values: dict[str, Any], path: str) -> M:
        chosen = [name for name in kind.ONE_OF if values.get(name) is not None]
        if len(chosen) > 1:
            names = " and ".join(in_case(name, self.case) for name in chosen)
            self._refuse(path, "one-of", f"{names} exclude each other.", "Keep one.")
            values |= dict.fromkeys(chosen[1:])
        return kind(**values)

    def _value(self, spec: Field, held: object, path: str) -> Any:
        if spec.is_map:
            return self._map(held, path)
        return self._list(spec, held, path) if spec.is_repeated else self._one(spec, held, path)

    def _list(self, spec: Field, held: object, path: str) -> tuple[Any, ...]:
        if isinstance(held, Mapping):
            return self._list_of_mapping(spec, held, path)
        if not isinstance(held, (list, tuple)):
            return self._list_of_one(spec, held, path)
        return tuple(self._element(spec, each, f"{path}[{index}]") for index, each in enumerate(held))

    def _list_of_mapping(self, spec: Field, held: Mapping[Any, object], path: str) -> tuple[Any, ...]:
        """What a mapping in place of a list plainly means: one element, numbered elements, or names with their values."""
        rule, reason = "list-expected", "it is a mapping; the field is a list."
        if any(isinstance(key, str) and _has_field(spec, snake_name(key)) for key in held):
            self._refuse(path, rule, reason, "Put it into [ ].")
            return self._list(spec, [held], path)
        if _is_numbered(held):
            self._refuse(path, rule, reason, "Write its values in [ ], without the numbers.")
            return self._list(spec, [held[key] for key in sorted(held, key=int)], path)
        if held and _is_pair(spec):
            self._refuse(path, rule, reason, f"Write [{_pair(next(iter(held)))}], one for each name.")
            return tuple(self._read_pair(spec, pair, path) for pair in held.items())
        return self._cannot(path, rule, reason, f"Write [{self._example(spec)}].")

    def _list_of_one(self, spec: Field, held: object, path: str) -> tuple[Any, ...]:
        """A value, or a command line, in place of a list. A text may hold a secret and is not repeated."""
        rule = "list-expected"
        reason = f"it is {'one text' if isinstance(held, str) else told(held)}; the field is a list."
        if spec.is_message:
            return self._cannot(path, rule, reason, f"Write [{self._example(spec)}].")
        if spec.type is not str or not isinstance(held, str) or len(held.split()) < 2:
            self._refuse(path, rule, reason, "Put it into [ ].")
            return (self._quietly(spec, held, path),)
        fix = "Put each word into [ ] on its own"
        if _FOR_SHELLS.search(held):
            return self._cannot(path, rule, reason, f'{fix}, or write ["bash", "-c", "<the line>"].')
        self._refuse(path, rule, reason, f"{fix}.")
        return tuple(held.split())

    def _element(self, spec: Field, held: object, path: str) -> Any:
        """One of a list; where names have values, "A=b" and {A: b} are plain too."""
        if _is_pair(spec):
            pair: tuple[object, object] | None = None
            if isinstance(held, str) and re.match(r"\w+=", held):
                pair = (held.partition("=")[0], held.partition("=")[2])
            elif isinstance(held, Mapping) and len(held) == 1:
                pair = next(iter(held.items()))
                name = snake_name(_key(pair[0]))
                if advice_on(name) or nearest(name, [each.name for each in fields_of(spec.type)]):
                    pair = None
            if pair is not None:
                form = "the text NAME=value" if isinstance(held, str) else "the mapping {NAME: value}"
                self._refuse(path, "message-expected", f"it is {form}.", f"Write {_pair(pair[0])}.")
                return self._read_pair(spec, pair, path)
        return self._one(spec, held, path)

    def _read_pair(self, spec: Field, pair: tuple[object, object], path: str) -> Message:
        name, value = pair
        text = "" if value is None else self._quietly(_TEXT, value, path)
        read_as: Message = spec.type(name=_key(name), value=text)
        return read_as

    def _quietly(self, spec: Field, held: object, path: str) -> Any:
        """The value of what has been told already."""
        before = len(self.findings)
        value = self._one(spec, held, path)
        del self.findings[before:]
        return value

    def _map(self, held: object, path: str) -> Mapping[str, str]:
        if not isinstance(held, Mapping):
            reason = f"it is {told(held)}; the field maps texts to texts."
            self._cannot(path, "map-expected", reason, "Write {name: value}.")
            return {}
        return {
            _key(key): self._one(_TEXT, value, f"{path}[{_key(key)[:_LONGEST_KEY]!r}]")
            for key, value in held.items()
        }

    def _one(self, spec: Field, held: object, path: str) -> Any:
        if spec.is_message:
            return self.message(spec.type, held, path)
        scalar = read_scalar(spec, held, case=self.case, is_returned=self.is_returned)
        if scalar.rule:
            self._add(path, scalar.rule, scalar.reason, scalar.fix, is_error=scalar.is_error)
        if scalar.is_read:
            return scalar.value
        self.unread.add(path)
        if spec.has_presence:
            return None
        return spec.type() if spec.is_repeated else spec.default

    def _example(self, spec: Field) -> str:
        """An element of a list, as it may be written."""
        if not spec.is_message:
            return "..."
        names = (in_case(each.name, self.case) for each in fields_of(spec.type))
        return f"{{{', '.join(f'{name}: ...' for name in names)}}}"

    def _form(self, kind: type[Message]) -> str:
        return f"Write a mapping with {', '.join(in_case(spec.name, self.case) for spec in fields_of(kind))}."

    def _cannot(self, path: str, rule: str, reason: str, fix: str) -> tuple[()]:
        """Refuse what cannot be made out: rules say nothing of it."""
        self._refuse(path, rule, reason, fix)
        self.unread.add(path)
        return ()

    def _refuse(self, path: str, rule: str, reason: str, fix: str) -> None:
        self._add(path, rule, reason, fix, is_error=True)

    def _add(self, path: str, rule: str, reason: str, fix: str, *, is_error: bool) -> None:
        self.findings.append(
            Finding(
                path=path,
                rule=rule,
                reason=reason,
                fix=fix,
                severity="error" if is_error else "warning",
            )
        )


def _is_returned(kind: type[Message], value: object) -> bool:
    """Whether a document has what only the API writes; a name alone may be a misplaced display name."""
    if not isinstance(value, Mapping):
        return False
    names = {snake_name(key) for key in value if isinstance(key, str) and len(key) <= _LONGEST_KEY}
    return bool(names.intersection(kind.OUTPUT_ONLY) - {"name"})


def _filled(given: M, more: M) -> M:
    """A message with what it has not set taken from another."""
    unset = [spec.name for spec in fields_of(type(given)) if not spec.is_set(getattr(given, spec.name))]
    return dataclasses.replace(cast("Any", given), **{name: getattr(more, name) for name in unset})  # type: ignore[no-any-return]


def _below(path: str, name: str) -> str:
    """Path of a field; of a key that no field could have, its beginning in quotes."""
    if len(name) > _LONGEST_KEY or not re.fullmatch(r"[\w./-]+", name, re.ASCII):
        return f"{path}[{name[:_LONGEST_KEY]!r}]"
    return f"{path}.{name}" if path else name


def _key(key: object) -> str:
    """A key as text; of one that JSON does not have, what it is."""
    return key if isinstance(key, str) else "null" if key is None else told(key).removeprefix("the number ")


def _has_field(spec: Field, name: str) -> bool:
    """Whether a field holds a message, or messages, that has a field of this name."""
    return spec.is_message and any(each.name == name for each in fields_of(spec.type))


def _is_pair(spec: Field) -> bool:
    """Whether a field holds names and their values, as env does."""
    return spec.is_message and [each.name for each in fields_of(spec.type)] == ["name", "value"]


def _pair(name: object) -> str:
    """How a name and its value are written; the value may be a secret and is not repeated."""
    word = _key(name)[:_LONGEST_KEY]
    shown = word if re.fullmatch(r"[\w.-]+", word, re.ASCII) else repr(word)
    return f'{{name: {shown}, value: "..."}}'


def _is_numbered(held: Mapping[Any, object]) -> bool:
    return bool(held) and all(
        (isinstance(key, int) and not isinstance(key, bool))
        or (isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key))
        for key in held
    )


def _elsewhere(root: type[Message], name: str, known: Mapping[str, Field], case: Case) -> str:
    """Where a field of that name is, else what there is here."""
    homes = [
        f"{owner}: {in_case(path, case)}" for home, owner, path in _homes(cast("Any", root)) if home == name
    ]
    if homes:
        return f"It is a field of {' or '.join(homes)}."
    return f"It has {', '.join(in_case(each, case) for each in known)}."


@functools.cache
def _homes(root: Any) -> tuple[tuple[str, str, str], ...]:
    """Of every field of a document its name, its message and its path; of messages within their own kind once."""
    return tuple(_walk(root, "", ()))


def _walk(
    kind: type[Message], path: str, within: tuple[type[Message], ...]
) -> Iterator[tuple[str, str, str]]:
    for spec in fields_of(kind):
        at = _below(path, spec.name)
        yield spec.name, kind.__name__, at
        if spec.is_message and spec.type not in (*within, kind):
            yield from _walk(spec.type, f"{at}[]" if spec.is_repeated else at, (*within, kind))
