"""Frozen dataclasses to and from JSON, strictly: every unknown, missing or ill-typed field is an error that names it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ContractError(ValueError):
    """A config, manifest or dataset description that does not keep the contract.

    ContractError
    ├── UnknownFieldError   a field that does not exist; names the nearest one
    ├── FieldValueError     a field with a value of the wrong type or outside its range
    └── UnknownFormatError  a manifest of a format version that is not known here
    """


class UnknownFieldError(ContractError):
    """A field that the class does not have."""

    def __init__(self, path: str, known: Iterable[str]) -> None:
        known = sorted(known)
        nearest = difflib.get_close_matches(path, known, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        super().__init__(f"there is no field {path!r}.{hint} Fields here: {', '.join(known)}.")


class FieldValueError(ContractError):
    """A field whose value has the wrong type or is out of range."""

    def __init__(self, path: str, given: object, allowed: str) -> None:
        super().__init__(f"{path} = {given!r} is not valid: it must be {allowed}.")
        self.path = path


class UnknownFormatError(ContractError):
    """A manifest that another version of penstock has written, in a format that this one does not read."""


def require(condition: bool, path: str, given: object, allowed: str) -> None:
    """Raise FieldValueError unless `condition` holds; for use in `__post_init__`."""
    if not condition:
        raise FieldValueError(path, given, allowed)


def require_version(given: int, known: int, what: str, remedy: str, *, oldest: int | None = None) -> None:
    """Raise UnknownFormatError unless a manifest of the kind `what` has a format version that is known here.

    Those are `oldest` to `known`, or `known` alone.
    """
    if not (known if oldest is None else oldest) <= given <= known:
        reads = str(known) if oldest in (None, known) else f"{oldest} to {known}"
        raise UnknownFormatError(
            f"{what} format {given} is not known here (this version reads {reads}); {remedy}."
        )


def to_dict(value: Any) -> Any:
    """Plain JSON types of a dataclass instance, recursively. Tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_dict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(item) for item in value]
    return value


def canonical_json(value: Any) -> str:
    """The one spelling of a value: sorted keys, no spaces, ASCII. Equal values give equal bytes."""
    return json.dumps(
        to_dict(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def load_json(text: str | bytes, what: str) -> Any:
    """JSON types of a text. Raises ContractError, which names `what`, when it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as exc:  # also of bytes that are not UTF-8
        raise ContractError(f"{what} is not JSON: {exc}") from exc


def parse_json(cls: type[T], text: str | bytes, what: str) -> T:
    """Build a dataclass from a JSON text. Raises ContractError: not JSON, or what `from_dict` and `cls` refuse."""
    return from_dict(cls, load_json(text, what))


def from_dict(cls: type[T], data: Any, path: str = "") -> T:
    """Build a dataclass from JSON types.

    Raises UnknownFieldError for a key that `cls` does not have and FieldValueError for a value that does not fit
    its annotation or a required field that is absent. `path` is the dotted prefix used in messages.
    """
    if not isinstance(data, Mapping):
        raise FieldValueError(path or cls.__name__, data, f"an object with the fields of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # T is a dataclass
    for key in data:
        if key not in fields:
            raise UnknownFieldError(_join(path, str(key)), (_join(path, name) for name in fields))
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in data:
            raise FieldValueError(_join(path, name), None, "given: it has no default")
    built: T = cls(**{key: _coerce(hints[key], value, _join(path, key)) for key, value in data.items()})
    return built


def parse_leaf(cls: type[Any], dotted: str, text: str) -> Any:
    """The value that a command line spelling gives to the leaf field `dotted` of a tree of dataclasses.

    Raises UnknownFieldError (with the nearest of all leaf fields) or FieldValueError.
    """
    leaves = dict(leaf_types(cls))
    if dotted not in leaves:
        raise UnknownFieldError(dotted, leaves)
    return _parse(leaves[dotted], text, dotted)


def leaf_types(cls: type[Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted name, annotation) of every leaf field of a tree of dataclasses, in declaration order."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from leaf_types(typing.cast("type[Any]", hint), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _coerce(hint: Any, value: Any, path: str) -> Any:
    """`value` as JSON gives it, checked against a type annotation. 1.0 is accepted for an int; True never is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast("type[Any]", hint), value, path)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _coerce(inner, value, path)
    if origin is typing.Literal:
        require(value in arguments, path, value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        require(isinstance(value, (list, tuple)), path, value, "a list")
        return tuple(_coerce(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        require(isinstance(value, Mapping), path, value, "an object")
        return {key: _coerce(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    return _coerce_scalar(hint, value, path)


def _coerce_scalar(hint: Any, value: Any, path: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        require(number and float(value).is_integer(), path, value, "a whole number")
        return int(value)
    if hint is float:
        require(number, path, value, "a number")
        return float(value)
    if hint in (str, bool):
        require(isinstance(value, hint), path, value, {str: "a string", bool: "true or false"}[hint])
        return value
    if hint is Any:
        return value
    raise TypeError(f"the contract has no JSON form for {hint!r} (field {path})")


def _parse(hint: Any, text: str, path: str) -> Any:
    """A command line spelling as the JSON value it stands for. KFP writes an INTEGER parameter as `100` or `100.0`."""
    optional = type(None) in typing.get_args(hint)
    if optional and text in ("", "null"):
        return None
    inner = next((a for a in typing.get_args(hint) if a is not type(None)), hint) if optional else hint
    if inner is str or typing.get_origin(inner) is typing.Literal:
        return _coerce(inner, text, path)
    if inner is bool:
        require(text.lower() in ("true", "false"), path, text, "true or false")
        return text.lower() == "true"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise FieldValueError(path, text, f"a {getattr(inner, '__name__', inner)}") from exc
    return _coerce(hint, value, path)
