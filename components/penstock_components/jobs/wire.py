"""Messages to and from what the API takes: snake_case for Google's Python clients, camelCase for REST and gcloud.

A camelCase CustomJobSpec is also the file that `gcloud ai custom-jobs create --config` takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from penstock_components.jobs.findings import Case, in_case, require
from penstock_components.jobs.messages import Message
from penstock_components.jobs.reader import NOT_FINITE, read
from penstock_components.jobs.schema import Field, fields_of

M = TypeVar("M", bound=Message)

_MICROSECOND = timedelta(microseconds=1)


def to_api(message: Message, case: Case = "snake") -> dict[str, Any]:
    """What the API takes, as JSON's types; fields at their default are left out, empty messages are kept.

    Enumerations are names, durations texts such as "3600s", 64-bit integers numbers.
    """
    told: dict[str, Any] = {}
    for spec in fields_of(type(message)):
        value = getattr(message, spec.name)
        if spec.is_set(value):
            told[in_case(spec.name, case)] = _encode(spec, value, case)
    return told


def from_api(kind: type[M], value: object, case: Case | None = None) -> M:
    """The message that `value` holds, in the case that its keys have, if it is not given.

    Takes what Google's clients and the REST API return, output-only fields included, which it leaves out. Raises
    JobSpecError for every field that does not exist or cannot hold its value.
    """
    reading = read(kind, value, case=case or case_of(value))
    require(reading.findings)
    return reading.message


def case_of(value: object) -> Case:
    """camelCase if any key of a mapping or of what it holds is; snake_case when no key tells."""
    if isinstance(value, Mapping):
        for key, held in value.items():
            if isinstance(key, str) and re.search(r"[a-z][A-Z]", key):
                return "camel"
            if isinstance(key, str) and "_" in key:
                return "snake"
            if isinstance(held, (Mapping, list)) and case_of(held) == "camel":
                return "camel"
    if isinstance(value, list):
        return "camel" if any(case_of(each) == "camel" for each in value) else "snake"
    return "snake"


def duration_text(value: timedelta) -> str:
    """As proto3's JSON has it: "3600s", "3.5s"."""
    micros = value // _MICROSECOND
    seconds, fraction = divmod(abs(micros), 10**6)
    decimals = f".{fraction:06d}".rstrip("0") if fraction else ""
    return f"{'-' if micros < 0 else ''}{seconds}{decimals}s"


def _encode(spec: Field, value: Any, case: Case) -> Any:
    if spec.is_map:
        return dict(value)
    if spec.is_repeated:
        return [_encode_one(each, case) for each in value]
    return _encode_one(value, case)


def _encode_one(value: Any, case: Case) -> Any:
    if isinstance(value, Message):
        return to_api(value, case)
    if isinstance(value, timedelta):
        return duration_text(value)
    if case == "camel" and isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
        return next(text for text, number in NOT_FINITE.items() if repr(number) == repr(value))
    return value
