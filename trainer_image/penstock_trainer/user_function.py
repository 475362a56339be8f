"""A function of the user's by its name, `module:function`, as the config gives it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from penstock_trainer.errors import UserFunctionError


def call_user_function(source: str, arguments: Mapping[str, Any], *, section: str, or_else: str = "") -> Any:
    """What `module:function` returns for these keyword arguments.

    `section` is the config's that named it ("model": model.source with model.options); `or_else` what its source may
    be besides. Raises UserFunctionError when it cannot be found or does not take the arguments, and what it raises.
    """
    function = _function(source, section, or_else)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as exc:
        raise UserFunctionError(
            f"{source}{inspect.signature(function)} cannot be called with {dict(arguments)!r}: {exc}. "
            f"Change {section}.options or the function."
        ) from exc
    return function(**arguments)


def _function(source: str, section: str, or_else: str) -> Any:
    module_name, separator, name = source.partition(":")
    if not separator or not module_name or not name.isidentifier():
        raise UserFunctionError(
            f"{section}.source = {source!r} is not valid: it must be {or_else}module:function."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise UserFunctionError(
            f"{section}.source = {source!r}: {module_name} cannot be imported ({exc}). "
            "It must be installed in the trainer image or lie on PYTHONPATH."
        ) from exc
    function = getattr(module, name, None)
    if not callable(function):
        raise UserFunctionError(f"{section}.source = {source!r}: {module_name} has no function {name}.")
    return function
