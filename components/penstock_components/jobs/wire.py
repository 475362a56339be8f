"""Messages to and from what the API takes: snake_case for Google's Python clients, camelCase for REST and gcloud.

A camelCase CustomJobSpec is also the file that `gcloud ai custom-jobs create --config` takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from penstock_components.jobs.findings import Case, in_case, require
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message
from penstock_components.jobs.reader import read
from penstock_components.jobs.scalars import NOT_FINITE
from penstock_components.jobs.schema import Field, fields_of, snake_name

M = TypeVar("M", bound=Message)

_MICROSECOND = timedelta(microseconds=1)
_DEEPEST = 200
"""Levels in which `case_of` looks."""


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
    reading = read(kind, value, case=case or case_of(value, kind))
    require(reading.findings)
    return reading.message


def case_of(value: object, kind: type[Message] | None = None) -> Case:
    """The case in which most fields of a message are written, camelCase when as many are; snake_case when none tells.

    Only fields that there are tell: keys of labels, and names that nobody knows, are written as their authors like. Without
    `kind` the message is a CustomJob, a CustomJobSpec or a HyperparameterTuningJob.
    """
    camel = snake = 0
    waiting: list[tuple[object, type[Message], int]] = [(value, kind or _kind_of_job(value), 0)]
    while waiting:
        held, within, level = waiting.pop()
        if isinstance(held, (list, tuple)):
            waiting += [(each, within, level + 1) for each in held if level < _DEEPEST]
        elif isinstance(held, Mapping):
            known = {spec.name: spec for spec in fields_of(within)}
            for key, below in held.items():
                name = snake_name(key) if isinstance(key, str) else ""
                if name in known or name in within.OUTPUT_ONLY:
                    camel += key != name
                    snake += "_" in key
                if name in known and known[name].is_message and level < _DEEPEST:
                    waiting.append((below, known[name].type, level + 1))
    return "camel" if camel >= snake and camel else "snake"


def _kind_of_job(value: object) -> type[Message]:
    keys = {snake_name(key) for key in value if isinstance(key, str)} if isinstance(value, Mapping) else set()
    if keys & {"study_spec", "trial_job_spec"}:
        from penstock_components.jobs.study import HyperparameterTuningJob  # many messages, for few files

        return HyperparameterTuningJob
    return CustomJobSpec if "worker_pool_specs" in keys else CustomJob


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
