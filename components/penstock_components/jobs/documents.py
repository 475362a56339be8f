"""Reads JSON and YAML that somebody else wrote, within limits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, cast

import yaml

from penstock_components.jobs.findings import Finding, quoted

MOST_CHARACTERS = 8 * 2**20
"""Of a document; the largest pipeline of Google's samples has a few hundred thousand."""
_MOST_NODES = 1_000_000
"""Keys and values of a YAML document with its aliases and merge keys written out."""
_DEEPEST = 200
"""Levels of lists and mappings; protobuf reads 100 messages within each other, and half of the levels may be lists."""
_MOST_DIGITS = 300
"""Of a whole number; a double holds a few more, the API's widest integer twenty."""
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
"""Tags of YAML whose values JSON has too."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class DocumentError(ValueError):
    """A document that cannot be read; `finding` says why and where."""

    def __init__(self, rule: str, reason: str, fix: str) -> None:
        self.finding = Finding(path="", rule=rule, reason=reason, fix=fix)
        super().__init__(f"{reason} {fix}")


def parse(text: str, *, name: str = "") -> Any:
    """The value of a JSON or YAML text; of several YAML documents the first, as the pipeline backend reads them.

    What comes back is what JSON has: mappings, lists, texts, numbers, true, false and nothing; a whole number has at most
    300 digits, and at most 200 levels are within each other.

    Raises DocumentError: too long, too deep, not JSON or YAML, a key that stands twice, or aliases that unfold without end.
    """
    if len(text) > MOST_CHARACTERS:
        raise DocumentError(
            "too-large",
            f"it has {len(text):,} characters; a job spec or a compiled pipeline has at most {MOST_CHARACTERS:,}.",
            "Give the spec alone; data and code belong into Cloud Storage or the image.",
        )
    try:
        return _parsed(text, name)
    except RecursionError as exc:
        raise _too_deep() from exc


def _parsed(text: str, name: str) -> Any:
    if name.endswith(".json") or text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text, object_pairs_hook=_once, parse_int=_whole)
            if _HALF_PAIR.search(text):  # which may be one of a pair, or escaped itself
                json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise _unreadable("JSON", "a text has half of a surrogate pair, which is no character") from exc
        except ValueError as exc:
            if name.endswith(".json"):
                raise _unreadable("JSON", str(exc)) from exc
        else:
            _measure(document, {})
            return document
    try:
        return _parsed_yaml(text)
    except yaml.YAMLError as exc:
        raise _unreadable("JSON or YAML", " ".join(str(exc).split())) from exc
    except UnicodeError as exc:  # half of a surrogate pair
        raise _unreadable("JSON or YAML", str(exc)) from exc


def _parsed_yaml(text: str) -> Any:
    """Composed first and measured, since constructing writes merge keys out: nine lines of them can take all memory."""
    loader = _Loader(text)  # a SafeLoader
    try:
        node = loader.get_node() if loader.check_node() else None
        size, _ = _measure(node, {})
        if size > _MOST_NODES:
            raise DocumentError(
                "unfolds",
                f"its aliases and merge keys unfold to more than {_MOST_NODES:,} keys and values.",
                "Write the values out.",
            )
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when it is imported
    """Safe, refuses a key that stands twice and what JSON has not, and leaves dates as the text that they are."""

    level = 0

    def descend_resolver(self, *_: Any) -> None:
        """Called for each node before what it holds is composed, which in C ends the process when it is too deep."""
        self.level += 1
        if self.level > _DEEPEST:
            raise _too_deep()

    def ascend_resolver(self) -> None:
        self.level -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _at(key, f"the key {quoted(key.value)} stands twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        is_scalar = isinstance(node, yaml.ScalarNode)
        if is_scalar and node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            raise _at(node, f"the number {quoted(node.value)} has more than {_MOST_DIGITS} digits")
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError) as exc:  # `!!bool foo`, `!!int ""`, `0x_`
            told = quoted(node.value) if is_scalar else "it"
            raise _at(node, f"{told} is no {node.tag.rpartition(':')[2]}") from exc


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _PLAIN_TAGS
}


def _at(node: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {quoted(name)} stands twice")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"the number {quoted(digits)} has more than {_MOST_DIGITS} digits")
    return int(digits)


def _measure(value: object, known: dict[int, tuple[int, int]], level: int = 0) -> tuple[int, int]:
    """How many values a tree of values or of YAML nodes holds when its aliases are written out, and how many levels.

    What is shared is looked into once. Raises DocumentError when it is too deep.
    """
    held = _held(value)
    if held is None:
        return 1, 0
    if id(value) not in known:
        known[id(value)] = _MOST_NODES + 1, 0  # an alias to itself has no end
        size, depth = 1, 0
        if level < _DEEPEST:
            for each in held:
                more, deeper = _measure(each, known, level + 1)
                size += more
                if deeper > depth:
                    depth = deeper
        known[id(value)] = min(size, _MOST_NODES + 1), depth + 1
    size, depth = known[id(value)]
    if level + depth > _DEEPEST:
        raise _too_deep()
    return size, depth


def _held(value: object) -> Iterable[object] | None:
    """What a list or a mapping holds; None for what holds nothing."""
    kind = type(value)
    if kind is yaml.ScalarNode:
        return None
    if kind is yaml.MappingNode or kind is yaml.SequenceNode:
        below = cast("yaml.CollectionNode", value).value
        return itertools.chain.from_iterable(below) if kind is yaml.MappingNode else below
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else None


def _unreadable(kind: str, why: str) -> DocumentError:
    return DocumentError("unreadable", f"it is not {kind}: {why}.", "Correct it where the message points.")


def _too_deep() -> DocumentError:
    return DocumentError(
        "unreadable", "it is nested too deeply to be read.", "A job spec has about ten levels."
    )
