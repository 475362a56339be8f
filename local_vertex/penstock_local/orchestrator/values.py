"""Parameter values: declared types, conversion to them, and their text on a command line."""

import enum
import json
from collections.abc import Mapping
from typing import Any


class ParameterType(enum.Enum):
    """The declared type of a parameter; names and values are those of `ParameterTypeEnum`."""

    NUMBER_DOUBLE = "NUMBER_DOUBLE"
    NUMBER_INTEGER = "NUMBER_INTEGER"
    STRING = "STRING"
    BOOLEAN = "BOOLEAN"
    LIST = "LIST"
    STRUCT = "STRUCT"
    TASK_FINAL_STATUS = "TASK_FINAL_STATUS"


_PYTHON_TYPES: Mapping[ParameterType, type] = {
    ParameterType.STRING: str,
    ParameterType.BOOLEAN: bool,
    ParameterType.LIST: list,
    ParameterType.STRUCT: dict,
    ParameterType.TASK_FINAL_STATUS: dict,
}


def plain(value: Any) -> Any:
    """`value` with every whole float written as an int, at any depth.

    A protobuf `Value` knows only doubles, so `replica_count: 1` arrives as 1.0; the JSON that a task sees says 1.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def coerce(value: Any, parameter_type: ParameterType) -> Any:
    """`value` as the declared type. Raises `ValueError` saying what was given and what is wanted."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if parameter_type is ParameterType.NUMBER_DOUBLE and is_number:
        return float(value)
    if parameter_type is ParameterType.NUMBER_INTEGER and is_number and float(value).is_integer():
        return int(value)
    if isinstance(value, _PYTHON_TYPES.get(parameter_type, ())):
        return plain(value)
    raise ValueError(f"got {json.dumps(value)} ({type(value).__name__}), want {parameter_type.value}")


def parse_text(text: str, parameter_type: ParameterType) -> Any:
    """The value that a file or a placeholder gave as text. Raises `ValueError`.

    Strings are taken as they are and everything else is JSON; True and False are accepted for booleans, as on
    Vertex AI.
    """
    if parameter_type is ParameterType.STRING:
        return text
    try:
        value = json.loads(text.lower() if parameter_type is ParameterType.BOOLEAN else text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"got the text {text!r}, want {parameter_type.value} as JSON") from exc
    return coerce(value, parameter_type)


def to_text(value: Any) -> str:
    """What replaces a placeholder: a string as it is, everything else (None too) as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
