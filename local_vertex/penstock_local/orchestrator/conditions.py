"""Trigger conditions: the part of CEL that the KFP compiler writes, parsed and evaluated without `eval`.

Literals, `inputs.parameter_values['x']`, `int()`, `double()`, `string()`, the comparisons, `!`, `&&`, `||` and
parentheses. As in CEL, operands are never converted silently: a string compared with a number is an error.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_local.orchestrator.errors import ConditionError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|-?\.\d+(?:[eE][+-]?\d+)?)"
    r"|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<symbol>&&|\|\||[=!<>]=|[<>!()\[\].]))"
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_BINDING_POWER = {"||": 1, "&&": 2, "==": 3, "!=": 3, "<": 4, "<=": 4, ">": 4, ">=": 4}
_CONSTANTS = {"true": True, "false": False, "null": None}

Evaluate = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `is_true` raises `ConditionError` for operands of the wrong type or a missing input."""

    text: str
    _evaluate: Evaluate

    def is_true(self, parameters: Mapping[str, Any]) -> bool:
        """Whether the task triggers, given the values of the task's input parameters."""
        try:
            return _boolean(self._evaluate(parameters))
        except ConditionError as exc:
            raise ConditionError(f"condition {self.text!r}: {exc}") from exc


def parse_condition(text: str) -> Condition:
    """The condition in `text`. Raises `ConditionError` with the position of what cannot be read."""
    return Condition(text, _Parser(text).parse())


class _Parser:
    """Precedence climbing over the tokens of one condition; each rule returns a closure that evaluates it."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokenize(text)
        self._next = 0

    def parse(self) -> Evaluate:
        result = self._binary(1)
        if self._peek():
            raise ConditionError(f"unexpected {self._peek()!r} after a complete condition")
        return result

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _take(self, *expected: str) -> tuple[str, str]:
        if self._next == len(self._tokens):
            raise ConditionError(f"ends where {' or '.join(expected) or 'a value'} is expected")
        token = self._tokens[self._next]
        if expected and token[1] not in expected:
            raise ConditionError(f"unexpected {token[1]!r}, expected {' or '.join(expected)}")
        self._next += 1
        return token

    def _binary(self, minimum: int) -> Evaluate:
        left = self._unary()
        while _BINDING_POWER.get(self._peek(), 0) >= minimum:
            operator = self._take()[1]
            left = _binary(operator, left, self._binary(_BINDING_POWER[operator] + 1))
        return left

    def _unary(self) -> Evaluate:
        if self._peek() != "!":
            return self._primary()
        self._take("!")
        operand = self._unary()
        return lambda parameters: not _boolean(operand(parameters))

    def _primary(self) -> Evaluate:
        kind, text = self._take()
        if text == "(":
            inner = self._binary(1)
            self._take(")")
            return inner
        if kind in ("number", "string"):
            return _literal(_unquote(text) if kind == "string" else _number(text))
        if text in _CONSTANTS:
            return _literal(_CONSTANTS[text])
        if text in _CASTS:
            return self._cast(text)
        if text == "inputs":
            return self._input()
        raise ConditionError(
            f"unexpected {text!r}; known are inputs.parameter_values[...], {', '.join(_CASTS)}"
        )

    def _cast(self, name: str) -> Evaluate:
        self._take("(")
        operand = self._binary(1)
        self._take(")")
        return lambda parameters: _cast(name, operand(parameters))

    def _input(self) -> Evaluate:
        for expected in (".", "parameter_values", "["):
            self._take(expected)
        kind, text = self._take()
        if kind != "string":
            raise ConditionError(f"parameter_values takes a quoted name, got {text}")
        self._take("]")
        name = _unquote(text)

        def look_up(parameters: Mapping[str, Any]) -> Any:
            if parameters.get(name) is None:
                raise ConditionError(f"the input parameter {name!r} has no value")
            return parameters[name]

        return look_up


def _tokenize(text: str) -> list[tuple[str, str]]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ConditionError(f"cannot read {text[position:].strip()!r} (position {position})")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return tokens


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1])


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _literal(value: Any) -> Evaluate:
    return lambda _: value


def _binary(operator: str, left: Evaluate, right: Evaluate) -> Evaluate:
    if operator == "&&":
        return lambda parameters: _boolean(left(parameters)) and _boolean(right(parameters))
    if operator == "||":
        return lambda parameters: _boolean(left(parameters)) or _boolean(right(parameters))
    return lambda parameters: _compare(operator, left(parameters), right(parameters))


def _compare(operator: str, left: Any, right: Any) -> bool:
    if _kind(left) != _kind(right):
        raise ConditionError(
            f"cannot compare {_show(left)} {operator} {_show(right)}; use int(), double() or string()"
        )
    if operator == "==":
        return bool(left == right)
    if operator == "!=":
        return bool(left != right)
    if _kind(left) == "null":
        raise ConditionError(f"null has no order, in {operator}")
    below, equal = left < right, left == right
    return bool({"<": below, "<=": below or equal, ">": not below and not equal, ">=": not below}[operator])


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    raise ConditionError(f"a condition compares numbers, strings and booleans, not {_show(value)}")


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConditionError(f"{_show(value)} stands where true or false is expected")
    return value


def _cast(name: str, value: Any) -> Any:
    if isinstance(value, bool) and name == "string":
        return "true" if value else "false"
    if _kind(value) not in ("number", "string"):
        raise ConditionError(f"{name}() takes a number or a string, not {_show(value)}")
    try:
        return _CASTS[name](value)
    except (ValueError, OverflowError) as exc:
        raise ConditionError(f"{name}({value!r}): {exc}") from exc


def _show(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "double": float, "string": str}
