"""The `filter` of list requests (AIP-160) as far as the SDK and Cloud Logging readers use it.

Grammar: comparisons `path op value` with `=`, `!=`, `<`, `<=`, `>`, `>=`, `:` joined by AND and OR, NOT (or `-`) and
parentheses. As in AIP-160, OR binds closer than AND. What does not parse is INVALID_ARGUMENT, never "everything
matches".
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock_local.api.errors import InvalidArgumentError

Predicate = Callable[[Mapping[str, Any]], bool]

_TOKEN = re.compile(
    r'\s*(?:(?P<operator><=|>=|!=|=|<|>|:)|(?P<paren>[()])|(?P<minus>-(?=[\w"(]))'
    r'|(?P<string>"(?:[^"\\]|\\.)*"(?!\.))|(?P<word>(?:[^\s()<>=!:"]|"(?:[^"\\]|\\.)*")+))'
)
SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY")
_ORDERINGS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def parse_filter(text: str) -> Predicate:
    """A predicate over a resource as JSON types. Names may be snake_case or camelCase.

    Raises InvalidArgumentError when the text does not parse.
    """
    if not text.strip():
        return lambda _resource: True
    parser = _Parser(text)
    predicate = parser.conjunction()
    parser.expect_end()
    return predicate


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize(text)
        self._position = 0

    def _tokenize(self, text: str) -> list[tuple[str, str]]:
        tokens, position, end = [], 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"unexpected {text[position : position + 10]!r}")
            tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()
        return tokens

    def conjunction(self) -> Predicate:
        terms = [self._disjunction()]
        while self._take("word", "AND") or self._at_term():
            terms.append(self._disjunction())
        return lambda resource: all(term(resource) for term in terms)

    def _disjunction(self) -> Predicate:
        terms = [self._negation()]
        while self._take("word", "OR"):
            terms.append(self._negation())
        return lambda resource: any(term(resource) for term in terms)

    def _negation(self) -> Predicate:
        if self._take("word", "NOT") or self._take("minus", "-"):
            inner = self._negation()
            return lambda resource: not inner(resource)
        if self._take("paren", "("):
            inner = self.conjunction()
            if not self._take("paren", ")"):
                raise self._error("a closing parenthesis is missing")
            return inner
        return self._comparison()

    def _comparison(self) -> Predicate:
        path = self._next("word", "string")
        operator = self._next("operator")
        value = ("-" if self._take("minus", "-") else "") + self._next("word", "string")
        names = _path_names(path)
        wanted = re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
        return lambda resource: _compare(_look_up(resource, names), operator, wanted)

    def expect_end(self) -> None:
        if self._position < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._position][1]!r}")

    def _at_term(self) -> bool:
        """Whether another term follows without AND, which AIP-160 allows."""
        if self._position >= len(self._tokens):
            return False
        kind, value = self._tokens[self._position]
        return (kind in ("word", "string", "minus") and value not in ("AND", "OR")) or value == "("

    def _take(self, kind: str, value: str) -> bool:
        if self._position < len(self._tokens) and self._tokens[self._position] == (kind, value):
            self._position += 1
            return True
        return False

    def _next(self, *kinds: str) -> str:
        if self._position >= len(self._tokens) or self._tokens[self._position][0] not in kinds:
            raise self._error(f"a {' or '.join(kinds)} is missing")
        self._position += 1
        return self._tokens[self._position - 1][1]

    def _error(self, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"filter {self._text!r} does not parse: {reason}.")


def _path_names(path: str) -> list[str]:
    """`labels.run`, `labels."run-id"` and `display_name` as lists of names."""
    return [part.strip('"') for part in re.findall(r'"[^"]*"|[^.]+', path)]


def _look_up(resource: Mapping[str, Any], names: list[str]) -> Any:
    value: Any = resource
    for name in names:
        if not isinstance(value, Mapping):
            return None
        camel = re.sub(r"_(\w)", lambda match: match[1].upper(), name)
        value = value.get(name, value.get(camel))
    return value


def _compare(actual: Any, operator: str, wanted: str) -> bool:
    if operator == ":":
        if actual is None or wanted == "*":
            return actual is not None
        return wanted in actual if isinstance(actual, Mapping) else wanted.lower() in str(actual).lower()
    if operator == "=":
        return _text(actual) == wanted or _wildcard(actual, wanted)
    if operator == "!=":
        return not _compare(actual, "=", wanted)
    if actual is None:
        return False
    left, right = _ordered(str(actual)), _ordered(wanted)
    return type(left) is type(right) and _ORDERINGS[operator](left, right)


def _wildcard(actual: Any, wanted: str) -> bool:
    if "*" not in wanted or actual is None:
        return False
    return re.fullmatch(".*".join(re.escape(part) for part in wanted.split("*")), str(actual)) is not None


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def _ordered(text: str) -> float | datetime.datetime | str:
    """A number, a time, a severity's rank, or the text: whichever it is, so that `<` means what it says."""
    if text in SEVERITIES:
        return float(SEVERITIES.index(text))
    try:
        return float(text)
    except ValueError:
        pass
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
