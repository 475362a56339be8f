"""The parameters of a study: their values, scales and conditions, as the API's own descriptions have them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.study import (
    CategoricalValueSpec,
    ConditionalParameterSpec,
    DiscreteValueSpec,
    DoubleValueSpec,
    IntegerValueSpec,
    ParameterSpec,
)

MOST_DISCRETE_VALUES = 1000
LEAST_DISTANCE = 1e-10
"""Between two discrete values."""
_DEEPEST = 16
"""Of conditional parameters; deeper ones are not looked at."""
_VALUE_SPECS = ("double_value_spec", "integer_value_spec", "categorical_value_spec", "discrete_value_spec")
_CONDITIONS = {
    "parent_discrete_values": "discrete_value_spec",
    "parent_int_values": "integer_value_spec",
    "parent_categorical_values": "categorical_value_spec",
}
_LOG_SCALES = ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")


def all_parameters(path: str, parameters: Iterable[ParameterSpec]) -> Iterator[tuple[str, ParameterSpec]]:
    """Those of a list and those that hang on them, at every level that is looked at, each with its path."""
    level = [(f"{path}[{index}]", parameter) for index, parameter in enumerate(parameters)]
    for _ in range(_DEEPEST + 1):
        yield from level
        level = [
            (f"{above}.conditional_parameter_specs[{index}].parameter_spec", condition.parameter_spec)
            for above, parameter in level
            for index, condition in enumerate(parameter.conditional_parameter_specs)
            if condition.parameter_spec is not None
        ]


def check_ids(field: str, ids: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """That each has an ID of its own, without white space. `ids` are paths of what is named, and IDs; `field` holds them."""
    seen: dict[str, str] = {}
    for path, name in ids:
        reason = ""
        if not name:
            reason = "it is missing."
        elif re.search(r"\s", name):
            reason = f"{quoted(name)} holds white space."
        elif name in seen:
            reason = f"{quoted(name)} stands twice; {seen[name]} has it."
        if reason:
            yield Finding(
                path=f"{path}.{field}",
                rule=field.replace("_", "-"),
                reason=reason,
                fix="Give each its own name, without white space.",
            )
        seen.setdefault(name, path)


def check_parameter(
    path: str, parameter: ParameterSpec, algorithm: str, *, depth: int = 0
) -> Iterator[Finding]:
    """One parameter and those that hang on it."""
    given = [name for name in _VALUE_SPECS if getattr(parameter, name) is not None]
    if len(given) != 1:
        yield Finding(
            path=path,
            rule="one-of" if given else "parameter-values",
            reason=f"{' and '.join(given)} exclude each other."
            if given
            else "it says of no values what they are.",
            fix="Keep one." if given else f"Give one of {', '.join(_VALUE_SPECS)}.",
        )
        return
    name = given[0]
    values = getattr(parameter, name)
    yield from _values(f"{path}.{name}", values)
    yield from _scale(path, parameter, values)
    if algorithm == "GRID_SEARCH" and name == "double_value_spec":
        yield Finding(
            path=f"{path}.{name}",
            rule="grid-search",
            reason="GRID_SEARCH takes integer, categorical and discrete parameters; a range of numbers has no grid.",
            fix="Write discrete_value_spec with the values to try, or leave algorithm out.",
        )
    if values.default_value is not None:
        yield unsupported(f"{path}.{name}.default_value")
    if depth < _DEEPEST:
        for index, condition in enumerate(parameter.conditional_parameter_specs):
            below = f"{path}.conditional_parameter_specs[{index}]"
            yield from _condition(below, condition, parameter, algorithm, depth=depth)


def _values(
    path: str, values: DoubleValueSpec | IntegerValueSpec | CategoricalValueSpec | DiscreteValueSpec
) -> Iterator[Finding]:
    if isinstance(values, (DoubleValueSpec, IntegerValueSpec)):
        yield from _range(path, values.min_value, values.max_value)
    elif not values.values:
        yield missing(f"{path}.values", "Give the values to try.")
    elif isinstance(values, CategoricalValueSpec):
        if len(set(values.values)) < len(values.values):
            yield Finding(
                path=f"{path}.values",
                rule="parameter-values",
                reason="a value stands twice.",
                fix="Give each value once.",
            )
    else:
        yield from _discrete(f"{path}.values", values.values)


def _range(path: str, low: float, high: float) -> Iterator[Finding]:
    if math.isfinite(low) and math.isfinite(high) and low < high:
        return
    is_one = low == high and math.isfinite(low)
    yield Finding(
        path=f"{path}.max_value",
        rule="parameter-range",
        reason=f"{low} to {high} is one value; nothing is searched."
        if is_one
        else f"{low} to {high} is no range.",
        fix="Write a max_value above min_value; both are included.",
        severity="warning" if is_one and low else "error",
    )


def _discrete(path: str, values: Sequence[float]) -> Iterator[Finding]:
    if len(values) > MOST_DISCRETE_VALUES:
        yield Finding(
            path=path,
            rule="parameter-values",
            reason=f"there are {len(values)} values; a parameter takes {MOST_DISCRETE_VALUES}.",
            fix="Write double_value_spec or integer_value_spec for a range.",
        )
    if not all(math.isfinite(value) for value in values) or any(
        not after - before >= LEAST_DISTANCE for before, after in itertools.pairwise(values)
    ):
        yield Finding(
            path=path,
            rule="parameter-values",
            reason=f"the values do not increase by at least {LEAST_DISTANCE:g} from one to the next.",
            fix="Sort them and give each once.",
        )


def _scale(
    path: str,
    parameter: ParameterSpec,
    values: DoubleValueSpec | IntegerValueSpec | CategoricalValueSpec | DiscreteValueSpec,
) -> Iterator[Finding]:
    scale = parameter.scale_type
    if isinstance(values, CategoricalValueSpec):
        if scale:
            yield Finding(
                path=f"{path}.scale_type",
                rule="parameter-scale",
                reason="categories have no scale.",
                fix="Leave it out.",
            )
        return
    least = min(values.values, default=1.0) if isinstance(values, DiscreteValueSpec) else values.min_value
    if scale in _LOG_SCALES and least <= 0:
        yield Finding(
            path=f"{path}.scale_type",
            rule="parameter-scale",
            reason=f"{scale} needs values above 0, and the least is {least}.",
            fix="Raise the least value above 0, or write UNIT_LINEAR_SCALE.",
        )


def _condition(
    path: str, condition: ConditionalParameterSpec, parent: ParameterSpec, algorithm: str, *, depth: int
) -> Iterator[Finding]:
    given = [name for name in _CONDITIONS if getattr(condition, name) is not None]
    wanted = next((name for name, of in _CONDITIONS.items() if getattr(parent, of) is not None), "")
    if given != [wanted]:
        told = f"{wanted} alone" if wanted else "no conditional parameter: its parent is a range of numbers"
        yield Finding(
            path=f"{path}.{given[0]}" if given else path,
            rule="parameter-condition",
            reason=f"the parent {quoted(parent.parameter_id)} takes {told}; given is {' and '.join(given) or 'none'}.",
            fix="Write the parent's values at which this parameter is there."
            if wanted
            else "Give it a parent of discrete, integer or categorical values.",
        )
    else:
        yield from _parent_values(f"{path}.{wanted}.values", getattr(condition, wanted).values, parent)
    if condition.parameter_spec is None:
        yield missing(f"{path}.parameter_spec", "Give the parameter.")
        return
    yield from check_parameter(f"{path}.parameter_spec", condition.parameter_spec, algorithm, depth=depth + 1)


def _parent_values(path: str, values: Sequence[object], parent: ParameterSpec) -> Iterator[Finding]:
    if not values:
        yield missing(path, "Write the parent's values at which this parameter is there.")
        return
    strangers = [value for value in values if not _has(parent, value)]
    if strangers:
        stranger = quoted(strangers[0]) if isinstance(strangers[0], str) else strangers[0]
        yield Finding(
            path=path,
            rule="parameter-condition",
            reason=f"the parent {quoted(parent.parameter_id)} never is {stranger}.",
            fix="Write values that it takes.",
        )


def _has(parent: ParameterSpec, value: object) -> bool:
    if isinstance(value, str):
        return parent.categorical_value_spec is not None and value in parent.categorical_value_spec.values
    if not isinstance(value, (int, float)):
        return False
    if parent.integer_value_spec is not None:
        return parent.integer_value_spec.min_value <= value <= parent.integer_value_spec.max_value
    known = parent.discrete_value_spec.values if parent.discrete_value_spec is not None else ()
    return any(abs(each - value) <= LEAST_DISTANCE for each in known)


def missing(path: str, fix: str) -> Finding:
    """A field that the API requires is not there."""
    return Finding(path=path, rule="required", reason="it is missing.", fix=fix)


def unsupported(path: str) -> Finding:
    """A field that only Vizier heeds is set."""
    return Finding(
        path=path,
        rule="study-unsupported",
        reason="only the Vizier service takes it, not a hyperparameter tuning job.",
        fix="Leave it out.",
        severity="warning",
    )
