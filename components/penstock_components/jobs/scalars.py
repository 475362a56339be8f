"""One text, number, duration or enumeration: what is meant, and what is wrong with how it is written.

What protobuf's own reader of JSON takes is taken: "3" and "3e0" for 3, "0.001" for 0.001, "2" for an enumeration's second.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock_components.jobs.findings import Case, quoted
from penstock_components.jobs.schema import Field

PLACEHOLDER = re.compile(r"\{\{\$|\{\{channel:")
"""What a compiled pipeline holds where a value is known only when it runs."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""As proto3's JSON writes numbers that JSON has not."""
_LONGEST_DURATION = 315_576_000_000
"""Seconds: 10,000 years, as google.protobuf.Duration has it."""
_LONGEST_WORD = 100
"""Characters of a number, or of what may be a misspelt name."""
_DURATION = re.compile(r"([+-]?)([0-9]{1,18})(?:\.([0-9]{0,18}))?s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """What a value says, and what is wrong with how it says it; `rule` is empty when nothing is."""

    value: Any
    is_read: bool = True
    """Whether it could be made out; if not, `value` is None."""
    rule: str = ""
    reason: str = ""
    fix: str = ""
    is_error: bool = True


def read_scalar(spec: Field, held: object, *, case: Case, is_returned: bool) -> Scalar:
    """The value of a field, or of one element of it, that is no message.

    `is_returned` says that Google's client wrote it, whose 64-bit integers are texts also in snake_case. Raises nothing.
    """
    if isinstance(held, str) and PLACEHOLDER.search(held) and (spec.values or spec.type is not str):
        return _placeholder(spec, held)
    if spec.values:
        return _enumeration(spec, held)
    if spec.type is int:
        return _integer(spec, held, case, is_returned)
    if spec.type is float:
        return _float(held, case, is_returned)
    return {str: _text, bool: _boolean, timedelta: _duration}[spec.type](held)


def told(value: object) -> str:
    """What stands there, for people, in a few words."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    if isinstance(value, str):
        return f"the text {_cut(value)}"
    if isinstance(value, (Mapping, list, tuple)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if isinstance(value, int) and value.bit_length() > _LONGEST_WORD:
        return f"a number of {value.bit_length()} bits"
    return f"the number {value}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def nearest(word: str, allowed: list[str], *, cutoff: float = 0.6) -> str | None:
    """Which of these names was probably meant."""
    if len(word) > _LONGEST_WORD:
        return None
    return next(iter(difflib.get_close_matches(word, allowed, n=1, cutoff=cutoff)), None)


def _cut(text: str) -> str:
    return repr(text) if len(text) < 58 else f"{text[:55]!r}..."


def _unread(rule: str, reason: str, fix: str) -> Scalar:
    return Scalar(value=None, is_read=False, rule=rule, reason=reason, fix=fix)


def _placeholder(spec: Field, held: str) -> Scalar:
    if spec.values:
        return _unread(
            "placeholder",
            f"it is a placeholder of the pipeline, {quoted(held)}; machines are decided when the pipeline is compiled.",
            "Give the name itself.",
        )
    return _unread(
        "placeholder",
        f"it is a placeholder of the pipeline, {quoted(held)}: the value would be known only when the pipeline runs, and "
        "reach the API as text.",
        "Decide it when the pipeline is compiled; make one pipeline for each value.",
    )


def _enumeration(spec: Field, held: object) -> Scalar:
    names = {number: name for name, number in spec.values.items()}
    number = _whole(held)
    if isinstance(held, str) and (held in spec.values or not held):
        return Scalar(value=held if spec.values.get(held) else "")
    if number in names:
        return Scalar(value=names[number] if number else "")
    allowed = [name for name, number in spec.values.items() if number]
    if isinstance(held, str):
        meant = nearest(held.upper().replace("-", "_"), allowed)
        if meant is not None:
            return Scalar(
                value=meant,
                rule="enum",
                reason=f"{quoted(held)} is none of its values.",
                fix=f"Write {meant}.",
            )
    return _unread("enum", f"it is {told(held)}.", f"Write one of {', '.join(allowed)}.")


def _text(held: object) -> Scalar:
    rule, reason = "text-expected", f"it is {told(held)}; the field is text."
    if isinstance(held, str):
        if held.isascii() or _is_whole_text(held):
            return Scalar(value=held)
        return _unread(rule, f"{_cut(held)} has half of a surrogate pair.", "Write the character itself.")
    if held is None:
        return Scalar(value="", rule=rule, reason=reason, fix='Write "" for the empty text, or remove it.')
    if isinstance(held, (int, float)) and (isinstance(held, float) or held.bit_length() <= _LONGEST_WORD):
        meant = str(held).lower() if isinstance(held, bool) else str(held)
        return Scalar(value=meant, rule=rule, reason=reason, fix=f'Quote it: "{meant}".')
    return _unread(rule, reason, "Write one text.")


def _is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _boolean(held: object) -> Scalar:
    if isinstance(held, bool):
        return Scalar(value=held)
    meant = {"true": True, "false": False}.get(held.lower()) if isinstance(held, str) else None
    if meant is None:
        return _unread("bool-expected", f"it is {told(held)}.", "Write true or false.")
    fix = f"Write {str(meant).lower()}, without quotes."
    return Scalar(value=meant, rule="bool-expected", reason=f"it is {told(held)}.", fix=fix)


def _integer(spec: Field, held: object, case: Case, is_returned: bool) -> Scalar:
    value, bits = _whole(held), 63 if spec.is_int64 else 31
    if value is None:
        cut = ", and Google's client would cut it off without a word" if isinstance(held, float) else ""
        return _unread(
            "number-expected", f"it is {told(held)}, no whole number{cut}.", "Write a whole number."
        )
    if not -(2**bits) <= value < 2**bits:
        return _unread(
            "number-expected", f"{told(held)} does not fit {bits + 1} bits.", "Write a smaller number."
        )
    is_usual = spec.is_int64 and (case == "camel" or is_returned)  # proto3's JSON has them as texts
    return _unquoted(held, value) if isinstance(held, str) and not is_usual else Scalar(value=value)


def _unquoted(held: str, value: float) -> Scalar:
    """A number that was given as text: JSON may, Google's Python classes take most of them as numbers only."""
    shown = (
        repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    )  # YAML 1.1 takes 1e-10 for text
    return Scalar(
        value=value,
        rule="number-expected",
        reason=f"it is {told(held)}.",
        fix=f"Write {shown}, without quotes.",
        is_error=False,
    )


def _whole(held: object) -> int | None:
    """The integer that a number or a text is; as protobuf reads it, "3.0" and "1e3" are some."""
    if isinstance(held, int):
        return None if isinstance(held, bool) else held
    if isinstance(held, str):
        if len(held) > _LONGEST_WORD or " " in held:
            return None
        try:
            return int(held)
        except ValueError:
            held = _number(held)
    return int(held) if isinstance(held, float) and held.is_integer() else None


def _number(text: str) -> float | None:
    """The number that a text is, as protobuf reads it."""
    if text in NOT_FINITE:
        return NOT_FINITE[text]
    try:
        return float(text) if len(text) <= _LONGEST_WORD and text != "nan" else None
    except ValueError:
        return None


def _float(held: object, case: Case, is_returned: bool) -> Scalar:
    if isinstance(held, str):
        value = _number(held)
        if value is not None:
            is_usual = held in NOT_FINITE or case == "camel" or is_returned
            return Scalar(value=value) if is_usual else _unquoted(held, value)
    if isinstance(held, (int, float)) and not isinstance(held, bool):
        try:
            return Scalar(value=float(held))
        except OverflowError:
            return _unread(
                "number-expected", f"it is {told(held)}.", "Write a number that a double can hold."
            )
    return _unread("number-expected", f"it is {told(held)}.", "Write a number.")


def _duration(held: object) -> Scalar:
    if isinstance(held, timedelta):
        return Scalar(value=held)
    nanos = _nanos(held)
    if nanos is None:
        fix = 'Write seconds with an s, such as "3600s" or "0.5s".'
        return _unread("duration-expected", f"it is {told(held)}, no duration.", fix)
    if abs(nanos) > _LONGEST_DURATION * 10**9:
        return _unread(
            "duration-expected",
            f"it is {told(held)}; a duration has at most {_LONGEST_DURATION:,} seconds.",
            "Write fewer seconds.",
        )
    if nanos % 1000:
        return _unread(
            "duration-expected",
            f"it is {told(held)}, finer than a microsecond, which is not kept here.",
            "Round it to microseconds.",
        )
    value = timedelta(microseconds=nanos // 1000)
    if not isinstance(held, (int, float)):
        return Scalar(value=value)
    shown = f"{held:.6f}".rstrip("0").rstrip(".") if isinstance(held, float) else held
    reason = f"it is {told(held)}; a duration is text."
    return Scalar(value=value, rule="duration-expected", reason=reason, fix=f'Write "{shown}s".')


def _nanos(held: object) -> int | None:
    """Of a duration's text, of its seconds and nanos, or of a bare number, which is seconds to microseconds."""
    if isinstance(held, str):
        match = _DURATION.fullmatch(held)
        if match is None:
            return None
        nanos = int(match[2]) * 10**9 + round(int((match[3] or "0").ljust(18, "0")) / 10**9)
        return -nanos if match[1] == "-" else nanos
    if isinstance(held, Mapping) and set(held) <= {"seconds", "nanos"}:
        parts = [_whole(held.get(name, 0)) for name in ("seconds", "nanos")]
        return None if None in parts else (parts[0] or 0) * 10**9 + (parts[1] or 0)
    if isinstance(held, float):
        return round(held * 10**6) * 1000 if math.isfinite(held * 10**6) else None
    return held * 10**9 if isinstance(held, int) and not isinstance(held, bool) else None
