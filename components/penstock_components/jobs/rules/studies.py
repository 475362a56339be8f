"""What a hyperparameter tuning job searches: metrics, parameters, trials. As the API's own descriptions have it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec
from penstock_components.jobs.rules.contents import (
    programs,
    quoted,
)
from penstock_components.jobs.rules.identity import check_resource
from penstock_components.jobs.study import (
    CategoricalValueSpec,
    ConditionalParameterSpec,
    DiscreteValueSpec,
    DoubleValueSpec,
    HyperparameterTuningJob,
    IntegerValueSpec,
    MetricSpec,
    ParameterSpec,
    StudySpec,
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
_TEMPLATE = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")
_LOG_SCALES = ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")


def check(job: HyperparameterTuningJob) -> Iterator[Finding]:
    """The job's name and labels, its study, its numbers of trials, and the trials' arguments."""
    yield from check_resource(job.display_name, job.labels, job.encryption_spec)
    yield from _counts(job)
    study = job.study_spec
    if study is None:
        yield _missing("study_spec", "Give metrics and parameters.")
        return
    yield from _metrics(study.metrics)
    yield from _parameters(study)
    if study.observation_noise:
        yield _unsupported("study_spec.observation_noise")
    yield from _arguments(
        job.trial_job_spec or CustomJobSpec(), {each.parameter_id for each in study.parameters}
    )


def _counts(job: HyperparameterTuningJob) -> Iterator[Finding]:
    if job.max_trial_count < 1:
        yield _count(
            "max_trial_count", job.max_trial_count, "Write how many trials the study has in all, 1 or more."
        )
    if job.parallel_trial_count < 1:
        yield _count(
            "parallel_trial_count",
            job.parallel_trial_count,
            "Write how many trials run at a time, 1 or more.",
        )
    elif job.parallel_trial_count > job.max_trial_count >= 1:
        yield Finding(
            path="parallel_trial_count",
            rule="trial-count",
            reason=f"{job.parallel_trial_count} trials at a time are more than the {job.max_trial_count} of max_trial_count.",
            fix=f"Write {job.max_trial_count} or less; fewer at a time learn more from each other.",
        )
    if job.max_failed_trial_count < 0:
        yield _count(
            "max_failed_trial_count",
            job.max_failed_trial_count,
            "Write 0 for the service's own choice, or more.",
        )


def _count(path: str, count: int, fix: str) -> Finding:
    return Finding(path=path, rule="trial-count", reason=f"it is {count}.", fix=fix)


def _metrics(metrics: Sequence[MetricSpec]) -> Iterator[Finding]:
    path = "study_spec.metrics"
    if not metrics:
        yield _missing(path, "Name the metric that the trials report, and its goal.")
    yield from _ids(path, "metric_id", [metric.metric_id for metric in metrics])
    for index, metric in enumerate(metrics):
        if not metric.goal:
            yield Finding(
                path=f"{path}[{index}].goal",
                rule="metric-goal",
                reason="it is missing, and would be taken for MAXIMIZE.",
                fix="Write MAXIMIZE or MINIMIZE.",
            )
        safety = metric.safety_config
        fraction = safety.desired_min_safe_trials_fraction if safety is not None else None
        if fraction is not None and not 0 <= fraction <= 1:
            yield Finding(
                path=f"{path}[{index}].safety_config.desired_min_safe_trials_fraction",
                rule="metric-safety",
                reason=f"{fraction} is no fraction.",
                fix="Write 0 to 1.",
            )
    if metrics and all(metric.safety_config is not None for metric in metrics):
        yield Finding(
            path=path,
            rule="metric-safety",
            reason="every metric is a constraint (safety_config); none is left to be tuned for.",
            fix="Add the metric that is the goal, without safety_config.",
        )


def _parameters(study: StudySpec) -> Iterator[Finding]:
    path = "study_spec.parameters"
    if not study.parameters:
        yield _missing(path, "Give at least one parameter.")
    yield from _ids(path, "parameter_id", [each.parameter_id for each in study.parameters])
    for index, parameter in enumerate(study.parameters):
        yield from _parameter(f"{path}[{index}]", parameter, study.algorithm, depth=0)


def _ids(path: str, field: str, ids: Sequence[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, name in enumerate(ids):
        reason = ""
        if not name:
            reason = "it is missing."
        elif re.search(r"\s", name):
            reason = f"{quoted(name)} holds white space."
        elif name in seen:
            reason = f"{quoted(name)} stands twice."
        if reason:
            yield Finding(
                path=f"{path}[{index}].{field}",
                rule=field.replace("_", "-"),
                reason=reason,
                fix="Give each its own name, without white space.",
            )
        seen.add(name)


def _parameter(path: str, parameter: ParameterSpec, algorithm: str, *, depth: int) -> Iterator[Finding]:
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
        yield _unsupported(f"{path}.{name}.default_value")
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
        yield _missing(f"{path}.values", "Give the values to try.")
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
        yield _missing(f"{path}.parameter_spec", "Give the parameter.")
        return
    yield from _ids_of_one(f"{path}.parameter_spec", condition.parameter_spec)
    yield from _parameter(f"{path}.parameter_spec", condition.parameter_spec, algorithm, depth=depth + 1)


def _ids_of_one(path: str, parameter: ParameterSpec) -> Iterator[Finding]:
    if not parameter.parameter_id or re.search(r"\s", parameter.parameter_id):
        yield Finding(
            path=f"{path}.parameter_id",
            rule="parameter-id",
            reason=f"it is {quoted(parameter.parameter_id)}." if parameter.parameter_id else "it is missing.",
            fix="Give it a name without white space.",
        )


def _parent_values(path: str, values: Sequence[object], parent: ParameterSpec) -> Iterator[Finding]:
    if not values:
        yield _missing(path, "Write the parent's values at which this parameter is there.")
        return
    strangers = [value for value in values if not _has(parent, value)]
    if strangers:
        yield Finding(
            path=path,
            rule="parameter-condition",
            reason=f"the parent {quoted(parent.parameter_id)} never is {quoted(str(strangers[0]))}.",
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


def _arguments(spec: CustomJobSpec, ids: set[str]) -> Iterator[Finding]:
    """The service appends `--<parameter_id>=<value>`; what stands there already is sent as it is, beside it."""
    for program in programs(spec):
        for path, word in program.words():
            template = next((match[1] for match in _TEMPLATE.finditer(word)), "")
            option = re.match(r"--?([^=\s]+)", word)
            if template:
                yield Finding(
                    path=f"trial_job_spec.{path}",
                    rule="argument-template",
                    reason=f"{{{{{template}}}}} would reach the program as it stands: nothing puts values into arguments.",
                    fix=f"Remove the argument: the service appends --{template}=<value> for the parameter of that ID.",
                )
            elif option is not None and option[1] in ids:
                yield Finding(
                    path=f"trial_job_spec.{path}",
                    rule="argument-twice",
                    reason=f"{option[1]} is a parameter of the study: the service appends --{option[1]}=<value> behind this one.",
                    fix="Remove it, so that no program has to choose.",
                    severity="warning",
                )


def _missing(path: str, fix: str) -> Finding:
    return Finding(path=path, rule="required", reason="it is missing.", fix=fix)


def _unsupported(path: str) -> Finding:
    return Finding(
        path=path,
        rule="study-unsupported",
        reason="only the Vizier service takes it, not a hyperparameter tuning job.",
        fix="Leave it out.",
        severity="warning",
    )
