"""The catalogue's file: tables of machines with their sources and date, one row to a line so that a change reads well."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

FILE_NAME = "machines.json"


class MachineError(ValueError):
    """A machine that does not exist, or accelerators or a topology that it does not have."""


@functools.cache
def tables() -> dict[str, Any]:
    """Everything the file holds. Nobody changes what this returns."""
    held: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text())
    return held


def render(held: dict[str, Any]) -> str:
    """The file's text: an entry of a table to a line."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_value(value)}" for key, value in held.items()) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
    if isinstance(value, dict) and value:
        rows = (f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
        return "{\n" + ",\n".join(rows) + "\n }"
    return json.dumps(value)
