"""Listing: where to look for names, which of them fold into prefixes, and which a glob selects."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from penstock_local.storage.errors import InvalidRequestError, UnsupportedError

MAX_RESULTS = 1000
_AFTER_ALL = b"\xff"  # never the first byte of UTF-8
_GLOB_TOKEN = re.compile(
    r"\\(?P<escaped>.)|(?P<class>\[[^\]/]+\])|(?P<special>\*\*|[*?{},\[])|(?P<literal>.)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListQuery:
    """One page of a listing, in the order of the names' UTF-8 bytes."""

    prefix: str = ""
    delimiter: str = ""
    """Names that have it behind the prefix fold into one entry of `prefixes`."""
    page_token: str = ""
    max_results: int = MAX_RESULTS
    """Of objects and prefixes together; never more than 1000 are given."""
    start_offset: str = ""
    """First name, inclusive."""
    end_offset: str = ""
    """Last name, exclusive; empty is none."""
    match_glob: str = ""
    include_trailing_delimiter: bool = False
    """Show an object whose name is a prefix also as an object."""

    def __post_init__(self) -> None:
        if self.max_results < 1:
            raise InvalidRequestError(f"maxResults is {self.max_results}; it must be 1 or more.")
        if self.match_glob and self.delimiter:
            raise UnsupportedError("matchGlob together with delimiter is not supported; use one of them.")

    def bounds(self) -> tuple[bytes, bytes]:
        """Names to look at: from the first, inclusive, to the second, exclusive."""
        prefix = self.prefix.encode()
        low = max(prefix, self.start_offset.encode(), _position(self.page_token))
        high = min(successor(prefix) if prefix else _AFTER_ALL, self.end_offset.encode() or _AFTER_ALL)
        return low, high

    def folded(self, name: bytes) -> bytes | None:
        """The prefix that stands for this name, or None when it is listed itself."""
        if not self.delimiter:
            return None
        delimiter = self.delimiter.encode()
        position = name.find(delimiter, len(self.prefix.encode()))
        return None if position < 0 else name[: position + len(delimiter)]


def successor(prefix: bytes) -> bytes:
    """The first string behind all that start with `prefix`. UTF-8 has no byte 0xff, so nothing carries."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def page_token(position: bytes) -> str:
    """Opaque text for the name at which the next page starts."""
    return base64.urlsafe_b64encode(position).decode()


def glob_pattern(glob: str) -> re.Pattern[str]:
    """`matchGlob` as a regular expression: `*` and `?` stay within a folder, `**` does not, `{a,b}` is either.

    Raises InvalidRequestError when a bracket is not closed.
    """
    pattern, depth = "", 0
    for token in _GLOB_TOKEN.finditer(glob):
        special = token["special"]
        if token["class"]:
            inside = token["class"][1:-1].replace("\\", r"\\").replace("[", r"\[")
            pattern += f"[^{inside[1:]}]" if inside[0] in "!^" and len(inside) > 1 else f"[{inside}]"
        elif special in {"**", "*", "?"}:
            pattern += {"**": ".*", "*": "[^/]*", "?": "[^/]"}[special]
        elif special == "{" or (special == "}" and depth) or (special == "," and depth):
            depth += {"{": 1, "}": -1, ",": 0}[special]
            pattern += {"{": "(?:", "}": ")", ",": "|"}[special]
        elif special == "[":
            raise InvalidRequestError(f"matchGlob {glob!r}: '[' is not closed.")
        else:
            pattern += re.escape(token["escaped"] or token["literal"] or special)
    if depth:
        raise InvalidRequestError(f"matchGlob {glob!r}: '{{' is not closed.")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as exc:
        raise InvalidRequestError(f"matchGlob {glob!r} is not a glob: {exc}.") from exc


def _position(token: str) -> bytes:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"pageToken {token!r} is not one that a listing returned.") from exc
