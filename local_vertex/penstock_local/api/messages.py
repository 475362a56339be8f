"""proto-plus and plain protobuf messages, handled alike."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from penstock_local.api.errors import InvalidArgumentError


def serialize(message: Any) -> bytes:
    """Wire bytes."""
    return raw(message).SerializeToString()


def deserialize(message_type: Any, data: bytes) -> Any:
    """A message of `message_type` (proto-plus or plain) from wire bytes."""
    return (
        message_type.deserialize(data)
        if hasattr(message_type, "deserialize")
        else message_type.FromString(data)
    )


def raw(message: Any) -> Message:
    """The plain protobuf message under a proto-plus one."""
    plain: Message = type(message).pb(message) if hasattr(type(message), "pb") else message
    return plain


def to_json(message: Any, *, integer_enums: bool = False) -> dict[str, Any]:
    """JSON types with camelCase names, as REST shows them."""
    told: dict[str, Any] = json_format.MessageToDict(raw(message), use_integers_for_enums=integer_enums)
    return told


def from_json(message_type: Any, data: dict[str, Any]) -> Any:
    """A message from JSON types, with camelCase or snake_case names.

    Raises InvalidArgumentError for an unknown field or a value that does not fit: nothing is ignored.
    """
    message = message_type()
    try:
        json_format.ParseDict(data, raw(message), ignore_unknown_fields=False)
    except json_format.ParseError as exc:
        raise InvalidArgumentError(str(exc)) from exc
    return message
