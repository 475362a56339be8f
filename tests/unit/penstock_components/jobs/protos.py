"""Random values of our messages, and the real protos beside them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from google.cloud import aiplatform_v1
from hypothesis import strategies

from penstock_components.jobs.messages import Message
from penstock_components.jobs.schema import Field, fields_of

_TEXT = strategies.text(strategies.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


def proto_of(kind: type[Message]) -> Any:
    """The proto-plus class of google.cloud.aiplatform_v1 with that name, wherever it is nested."""
    for owner in (
        aiplatform_v1.types,
        aiplatform_v1.StudySpec,
        aiplatform_v1.StudySpec.MetricSpec,
        aiplatform_v1.StudySpec.ParameterSpec,
        aiplatform_v1.StudySpec.ParameterSpec.ConditionalParameterSpec,
    ):
        if kind.__name__ in vars(owner):
            return vars(owner)[kind.__name__]
    raise LookupError(kind.__name__)


def messages(kind: type[Message], depth: int = 0) -> strategies.SearchStrategy[Any]:
    """Any value that the wire can carry; at most one of each oneof."""
    chosen = strategies.sampled_from([*kind.ONE_OF, None])

    def build(one: str | None, values: dict[str, Any]) -> Any:
        return kind(
            **{name: value for name, value in values.items() if name not in kind.ONE_OF or name == one}
        )

    fields = {field.name: _values(field, depth) for field in fields_of(kind)}
    return strategies.builds(build, chosen, strategies.fixed_dictionaries(fields))


def _values(field: Field, depth: int) -> strategies.SearchStrategy[Any]:
    if field.is_map:
        return strategies.dictionaries(_TEXT, _TEXT, max_size=3)
    one = _one(field, depth)
    if field.is_repeated:
        return strategies.lists(one, max_size=2 if depth < 6 else 0).map(tuple)
    return (
        strategies.none() | one
        if field.has_presence and depth < 8
        else (strategies.none() if field.has_presence else one)
    )


def _one(field: Field, depth: int) -> strategies.SearchStrategy[Any]:
    if field.is_message:
        return strategies.deferred(lambda: messages(field.type, depth + 1))
    if field.values:
        return strategies.sampled_from(["", *(name for name, number in field.values.items() if number)])
    if field.name == "end_time":
        return strategies.just("2026-11-21T10:00:00Z")
    bits = 63 if field.is_int64 else 31
    return {
        str: _TEXT,
        bool: strategies.booleans(),
        int: strategies.integers(-(2**bits), 2**bits - 1),
        float: strategies.floats(allow_nan=False),
        timedelta: strategies.timedeltas(timedelta(days=-3000), timedelta(days=3000)),
    }[field.type]
