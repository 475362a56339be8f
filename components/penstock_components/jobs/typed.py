"""Whether what an author made in Python has the types that it declares: nothing checks them when a program runs.

A text where a list of texts is meant would become its letters, and a pipeline parameter where a number is meant a text.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.reader import PLACEHOLDER


def mistyped(value: Any, path: str = "") -> Iterator[Finding]:
    """Fields of a dataclass, and of what it holds, whose value is not of the declared type."""
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        yield from _judge(hints[field.name], getattr(value, field.name), f"{path}.{field.name}".lstrip("."))


def _judge(hint: Any, value: Any, path: str) -> Iterator[Finding]:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin in (typing.Union, types.UnionType):
        choices = [list(_judge(each, value, path)) for each in inside]
        if all(choices):
            below = [found for found in choices if found[0].path != path]
            yield from below[0] if below else [_wrong(hint, value, path)]
    elif origin is typing.Literal:
        if not isinstance(value, str) or value not in inside:  # a pipeline parameter equals anything
            yield _wrong(hint, value, path)
    elif origin is tuple:
        if not isinstance(value, (tuple, list)):
            yield _wrong(hint, value, path)
            return
        for index, each in enumerate(value):
            yield from _judge(inside[0], each, f"{path}[{index}]")
    elif origin is Mapping:
        if not isinstance(value, Mapping):
            yield _wrong(hint, value, path)
            return
        for name, each in value.items():
            yield from _judge(inside[1], each, f"{path}[{name!r}]")
    elif not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        if not (hint is float and type(value) is int):
            yield _wrong(hint, value, path)
    elif dataclasses.is_dataclass(value):
        yield from mistyped(value, path)


def _wrong(hint: Any, value: Any, path: str) -> Finding:
    if PLACEHOLDER.search(str(value)):
        return Finding(
            path=path,
            rule="placeholder",
            reason=f"it is {value!s}, which is known only when the pipeline runs.",
            fix="Machines, their number and all else of a job but texts of its program are decided when the pipeline is "
            "compiled: give a constant, and make one pipeline for each value.",
        )
    return Finding(
        path=path,
        rule="python-type",
        reason=f"it is {quoted(repr(value))}, of type {type(value).__name__}.",
        fix=f"Give {_name(hint)}.",
    )


def _name(hint: Any) -> str:
    """A type for people."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(each) for each in inside)
    if origin is typing.Literal:
        return " or ".join(map(repr, inside))
    if origin is tuple:
        return f"a tuple of {_name(inside[0])}"
    if origin is Mapping:
        return f"a mapping of names to {_name(inside[1])}"
    return "None" if hint is type(None) else str(hint.__name__)
