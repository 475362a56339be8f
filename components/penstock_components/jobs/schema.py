"""What fields a message has, read off its dataclass."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from penstock_components.jobs.messages import Message


@dataclass(frozen=True, slots=True)
class Field:
    """One, as its annotation says."""

    name: str
    type: Any
    """str, bool, int, float, timedelta or a message class."""
    is_repeated: bool
    is_map: bool
    has_presence: bool
    default: Any
    values: Mapping[str, int]
    """Names of an enumeration; empty for other fields."""
    is_int64: bool

    @property
    def is_message(self) -> bool:
        """Whether it holds a message, or several."""
        return isinstance(self.type, type) and issubclass(self.type, Message)

    def is_set(self, value: Any) -> bool:
        """Whether the wire carries this value."""
        if self.has_presence:
            return value is not None
        return bool(value) or (isinstance(value, float) and math.copysign(1, value) < 0)


def fields_of(kind: type[Message]) -> tuple[Field, ...]:
    """The fields of a message class."""
    return _read_off(cast("Any", kind))  # mypy takes no class for hashable whose instances may not be


def snake_name(key: str) -> str:
    """The proto's name of a field that is written in either case."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f"_{match[1].lower()}", key)


@functools.cache
def _read_off(kind: Any) -> tuple[Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(_field(each, hints[each.name]) for each in dataclasses.fields(kind))


def _field(declared: dataclasses.Field[Any], hint: Any) -> Field:
    is_repeated = typing.get_origin(hint) is tuple
    is_map = typing.get_origin(hint) is Mapping
    has_presence = isinstance(hint, types.UnionType)
    if is_repeated or has_presence:
        hint = typing.get_args(hint)[0]
    return Field(
        name=declared.name,
        type=str if is_map else hint,
        is_repeated=is_repeated,
        is_map=is_map,
        has_presence=has_presence,
        default={} if is_map else declared.default,
        values=declared.metadata.get("enum", {}),
        is_int64=declared.metadata.get("int64", False),
    )
