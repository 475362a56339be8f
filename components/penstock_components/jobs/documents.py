"""Reads JSON and YAML that somebody else wrote, within limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from penstock_components.jobs.findings import Finding

MOST_CHARACTERS = 8 * 2**20
"""Of a document; the largest pipeline of Google's samples has a few hundred thousand."""
_MOST_NODES = 500_000
"""Of a document with its YAML aliases written out."""


class DocumentError(ValueError):
    """A document that cannot be read; `finding` says why and where."""

    def __init__(self, rule: str, reason: str, fix: str) -> None:
        self.finding = Finding(path="", rule=rule, reason=reason, fix=fix)
        super().__init__(f"{reason} {fix}")


def parse(text: str, *, name: str = "") -> Any:
    """The value of a JSON or YAML text; of several YAML documents the first, as the pipeline backend reads them.

    Raises DocumentError: too long, not JSON or YAML, a key that stands twice, or aliases that unfold without end.
    """
    if len(text) > MOST_CHARACTERS:
        raise DocumentError(
            "too-large",
            f"it has {len(text):,} characters; a job spec or a compiled pipeline has at most {MOST_CHARACTERS:,}.",
            "Give the spec alone; data and code belong into Cloud Storage or the image.",
        )
    if name.endswith(".json") or text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=_once)
        except RecursionError as exc:
            raise _too_deep() from exc
        except ValueError as exc:
            if name.endswith(".json"):
                raise _unreadable("JSON", str(exc)) from exc
    try:
        document = next(yaml.load_all(text, Loader=_Loader), None)  # a SafeLoader
    except yaml.YAMLError as exc:
        raise _unreadable("JSON or YAML", " ".join(str(exc).split())) from exc
    except RecursionError as exc:
        raise _too_deep() from exc
    if _size(document, {}) > _MOST_NODES:
        raise DocumentError(
            "unfolds", f"its aliases unfold to more than {_MOST_NODES:,} values.", "Write the values out."
        )
    return document


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when it is imported
    """Safe, refuses a key that stands twice, and leaves dates as the text that they are."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _size(value: Any, known: dict[int, int]) -> int:
    """Values in a tree whose aliases are shared; each is looked into once."""
    if not isinstance(value, (Mapping, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_NODES + 1  # an alias to itself has no end
        held = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_size(each, known) for each in held)
    return known[id(value)]


def _unreadable(kind: str, why: str) -> DocumentError:
    return DocumentError("unreadable", f"it is not {kind}: {why}.", "Correct it where the message points.")


def _too_deep() -> DocumentError:
    return DocumentError(
        "unreadable", "it is nested too deeply to be read.", "A job spec has about ten levels."
    )
