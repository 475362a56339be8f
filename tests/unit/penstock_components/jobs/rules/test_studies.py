"""Studies that cannot be searched, one fault at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_tuning_job
from penstock_components.jobs.study import (
    CategoricalValueCondition,
    CategoricalValueSpec,
    ConditionalParameterSpec,
    DiscreteValueCondition,
    DiscreteValueSpec,
    DoubleValueSpec,
    HyperparameterTuningJob,
    IntegerValueSpec,
    IntValueCondition,
    MetricSpec,
    ParameterSpec,
    SafetyMetricConfig,
    StudySpec,
)
from unit.penstock_components.jobs.rules.specs import container, job, pool

LR = ParameterSpec(
    parameter_id="lr",
    double_value_spec=DoubleValueSpec(min_value=1e-5, max_value=1e-2),
    scale_type="UNIT_LOG_SCALE",
)
LAYERS = ParameterSpec(
    parameter_id="layers",
    integer_value_spec=IntegerValueSpec(min_value=2, max_value=8),
    scale_type="UNIT_LINEAR_SCALE",
)
BATCH = ParameterSpec(parameter_id="batch", discrete_value_spec=DiscreteValueSpec(values=(16.0, 32.0, 64.0)))
OPTIMIZER = ParameterSpec(
    parameter_id="optimizer",
    categorical_value_spec=CategoricalValueSpec(values=("adamw", "sgd")),
    conditional_parameter_specs=(
        ConditionalParameterSpec(
            parent_categorical_values=CategoricalValueCondition(values=("sgd",)),
            parameter_spec=ParameterSpec(
                parameter_id="momentum", double_value_spec=DoubleValueSpec(min_value=0.5, max_value=0.99)
            ),
        ),
    ),
)
METRIC = MetricSpec(metric_id="val_loss", goal="MINIMIZE")
GOOD = HyperparameterTuningJob(
    display_name="tune",
    max_trial_count=20,
    parallel_trial_count=4,
    study_spec=StudySpec(metrics=(METRIC,), parameters=(LR, LAYERS, BATCH, OPTIMIZER)),
    trial_job_spec=job(),
)


def found(tuning: HyperparameterTuningJob) -> list[Finding]:
    return check_tuning_job(tuning, Context())


def study(**fields: Any) -> HyperparameterTuningJob:
    assert GOOD.study_spec is not None
    return replace(GOOD, study_spec=replace(GOOD.study_spec, **fields))


def refused(
    tuning: HyperparameterTuningJob, path: str, rule: str, *words: str, severity: str = "error"
) -> None:
    (finding,) = found(tuning)
    assert (finding.path, finding.rule, finding.severity) == (path, rule, severity)
    assert [word for word in words if word not in finding.told()] == [], finding.told()


def test_a_good_study_is_told_nothing() -> None:
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("field", "count", "word"),
    [
        ("max_trial_count", 0, "1 or more"),
        ("parallel_trial_count", 0, "1 or more"),
        ("parallel_trial_count", 21, "more than the 20"),
        ("max_failed_trial_count", -1, "it is -1"),
    ],
)
def test_trials_are_counted_from_one(field: str, count: int, word: str) -> None:
    refused(replace(GOOD, **{field: count}), field, "trial-count", word)


def test_one_trial_is_a_study_and_all_of_them_may_run_at_a_time() -> None:
    assert found(replace(GOOD, max_trial_count=1, parallel_trial_count=1)) == []
    assert found(replace(GOOD, parallel_trial_count=20)) == []


def test_a_tuning_job_has_a_study_a_name_and_a_job() -> None:
    refused(replace(GOOD, study_spec=None), "study_spec", "required", "metrics and parameters")
    refused(replace(GOOD, display_name=""), "display_name", "display-name")
    refused(replace(GOOD, trial_job_spec=None), "trial_job_spec", "required")


@pytest.mark.parametrize(
    ("metrics", "path", "rule", "word"),
    [
        ((), "", "required", "Name the metric"),
        ((replace(METRIC, metric_id=""),), "[0].metric_id", "metric-id", "missing"),
        ((replace(METRIC, metric_id="val loss"),), "[0].metric_id", "metric-id", "white space"),
        ((METRIC, METRIC), "[1].metric_id", "metric-id", "'val_loss' stands twice"),
        ((replace(METRIC, goal=""),), "[0].goal", "metric-goal", "taken for MAXIMIZE"),
        (
            (replace(METRIC, safety_config=SafetyMetricConfig()),),
            "",
            "metric-safety",
            "every metric is a constraint",
        ),
        (
            (
                METRIC,
                MetricSpec(
                    metric_id="latency",
                    goal="MINIMIZE",
                    safety_config=SafetyMetricConfig(desired_min_safe_trials_fraction=2.0),
                ),
            ),
            "[1].safety_config.desired_min_safe_trials_fraction",
            "metric-safety",
            "no fraction",
        ),
    ],
)
def test_a_metric_has_a_name_and_a_goal(
    metrics: tuple[MetricSpec, ...], path: str, rule: str, word: str
) -> None:
    refused(study(metrics=metrics), f"study_spec.metrics{path}", rule, word)


def double(low: float, high: float, **fields: Any) -> ParameterSpec:
    return ParameterSpec(
        parameter_id="x", double_value_spec=DoubleValueSpec(min_value=low, max_value=high), **fields
    )


def discrete(*values: float, **fields: Any) -> ParameterSpec:
    return ParameterSpec(parameter_id="x", discrete_value_spec=DiscreteValueSpec(values=values), **fields)


@pytest.mark.parametrize(
    ("parameter", "path", "rule", "word"),
    [
        (replace(LR, parameter_id=""), ".parameter_id", "parameter-id", "missing"),
        (replace(LR, parameter_id="learning rate"), ".parameter_id", "parameter-id", "white space"),
        (ParameterSpec(parameter_id="x"), "", "parameter-values", "double_value_spec"),
        (
            replace(BATCH, categorical_value_spec=CategoricalValueSpec(values=("a",))),
            "",
            "one-of",
            "exclude each other",
        ),
        (double(2, 1), ".double_value_spec.max_value", "parameter-range", "2 to 1 is no range"),
        (double(0, 0), ".double_value_spec.max_value", "parameter-range", "one value"),
        (double(0, math.inf), ".double_value_spec.max_value", "parameter-range", "no range"),
        (double(0, 1, scale_type="UNIT_LOG_SCALE"), ".scale_type", "parameter-scale", "above 0"),
        (
            double(-1, 1, scale_type="UNIT_REVERSE_LOG_SCALE"),
            ".scale_type",
            "parameter-scale",
            "the least is -1",
        ),
        (discrete(), ".discrete_value_spec.values", "required", "values to try"),
        (discrete(2.0, 1.0), ".discrete_value_spec.values", "parameter-values", "do not increase"),
        (discrete(1.0, 1.0 + 1e-11), ".discrete_value_spec.values", "parameter-values", "1e-10"),
        (
            discrete(*map(float, range(1001))),
            ".discrete_value_spec.values",
            "parameter-values",
            "1001 values",
        ),
        (discrete(0.0, 1.0, scale_type="UNIT_LOG_SCALE"), ".scale_type", "parameter-scale", "above 0"),
        (
            ParameterSpec(parameter_id="x", categorical_value_spec=CategoricalValueSpec()),
            ".categorical_value_spec.values",
            "required",
            "values to try",
        ),
        (
            ParameterSpec(parameter_id="x", categorical_value_spec=CategoricalValueSpec(values=("a", "a"))),
            ".categorical_value_spec.values",
            "parameter-values",
            "twice",
        ),
        (replace(OPTIMIZER, scale_type="UNIT_LINEAR_SCALE"), ".scale_type", "parameter-scale", "no scale"),
    ],
)
def test_a_parameter_that_cannot_be_searched_is_refused(
    parameter: ParameterSpec, path: str, rule: str, word: str
) -> None:
    refused(study(parameters=(parameter,)), f"study_spec.parameters[0]{path}", rule, word)


def test_a_range_of_one_value_is_a_warning() -> None:
    path = "study_spec.parameters[0].double_value_spec.max_value"
    refused(study(parameters=(double(1, 1),)), path, "parameter-range", "one value", severity="warning")


def test_parameters_have_names_of_their_own() -> None:
    refused(study(parameters=(LR, LR)), "study_spec.parameters[1].parameter_id", "parameter-id", "twice")
    refused(study(parameters=()), "study_spec.parameters", "required", "at least one")


def test_a_conditional_parameter_has_no_id_of_another_at_any_level() -> None:
    momentum = replace(LR, parameter_id="momentum")
    refused(
        study(parameters=(momentum, OPTIMIZER)),
        "study_spec.parameters[1].conditional_parameter_specs[0].parameter_spec.parameter_id",
        "parameter-id",
        "'momentum' stands twice; study_spec.parameters[0] has it",
    )


def test_a_grid_has_no_place_for_a_range_of_numbers() -> None:
    path = "study_spec.parameters[0].double_value_spec"
    refused(study(parameters=(LR,), algorithm="GRID_SEARCH"), path, "grid-search", "discrete_value_spec")
    assert found(study(parameters=(LAYERS, BATCH), algorithm="GRID_SEARCH")) == []


@pytest.mark.parametrize(
    ("condition", "path", "rule", "word"),
    [
        (
            {"parent_categorical_values": CategoricalValueCondition(values=("adam",))},
            ".parent_categorical_values.values",
            "parameter-condition",
            "never is 'adam'",
        ),
        (
            {"parent_categorical_values": CategoricalValueCondition()},
            ".parent_categorical_values.values",
            "required",
            "parent's values",
        ),
        ({"parent_categorical_values": None}, "", "parameter-condition", "given is none"),
        (
            {"parent_categorical_values": None, "parent_int_values": IntValueCondition(values=(1,))},
            ".parent_int_values",
            "parameter-condition",
            "takes parent_categorical_values alone",
        ),
        ({"parameter_spec": None}, ".parameter_spec", "required", "Give the parameter"),
        (
            {"parameter_spec": double(2, 1)},
            ".parameter_spec.double_value_spec.max_value",
            "parameter-range",
            "2 to 1",
        ),
        (
            {"parameter_spec": replace(LR, parameter_id="")},
            ".parameter_spec.parameter_id",
            "parameter-id",
            "missing",
        ),
    ],
)
def test_a_conditional_parameter_hangs_on_values_of_its_parent(
    condition: dict[str, Any], path: str, rule: str, word: str
) -> None:
    changed = replace(OPTIMIZER.conditional_parameter_specs[0], **condition)
    parent = replace(OPTIMIZER, conditional_parameter_specs=(changed,))
    at = f"study_spec.parameters[0].conditional_parameter_specs[0]{path}"
    refused(study(parameters=(parent,)), at, rule, word)


def under(parent: ParameterSpec, **condition: Any) -> HyperparameterTuningJob:
    child = ConditionalParameterSpec(parameter_spec=double(0, 1), **condition)
    return study(parameters=(replace(parent, conditional_parameter_specs=(child,)),))


def test_parents_of_every_kind_but_a_range_have_conditional_parameters() -> None:
    path = "study_spec.parameters[0].conditional_parameter_specs[0]"
    assert found(under(LAYERS, parent_int_values=IntValueCondition(values=(2, 8)))) == []
    outside = under(LAYERS, parent_int_values=IntValueCondition(values=(2, 9)))
    refused(outside, f"{path}.parent_int_values.values", "parameter-condition", "never is 9")
    assert found(under(BATCH, parent_discrete_values=DiscreteValueCondition(values=(16.0, 64.0)))) == []
    between = under(BATCH, parent_discrete_values=DiscreteValueCondition(values=(16.0, 17.0)))
    refused(between, f"{path}.parent_discrete_values.values", "parameter-condition", "never is 17.0")


def test_a_thousand_values_are_taken() -> None:
    assert found(study(parameters=(discrete(*map(float, range(1000))),))) == []


def test_a_range_of_numbers_has_no_conditional_parameters() -> None:
    parent = replace(LR, conditional_parameter_specs=OPTIMIZER.conditional_parameter_specs)
    path = "study_spec.parameters[0].conditional_parameter_specs[0].parent_categorical_values"
    refused(study(parameters=(parent,)), path, "parameter-condition", "its parent is a range of numbers")


def with_args(*args: str) -> HyperparameterTuningJob:
    return replace(GOOD, trial_job_spec=job(pool(container_spec=container(args=args))))


def test_a_templated_argument_is_refused_since_the_service_appends_the_value() -> None:
    refused(
        with_args("--epochs=3", "--lr={{lr}}"),
        "trial_job_spec.worker_pool_specs[0].container_spec.args[1]",
        "argument-template",
        "{{lr}}",
        "appends --lr=<value>",
    )


def test_an_argument_that_a_parameter_sets_as_well_is_a_warning() -> None:
    refused(
        with_args("--lr=0.1"),
        "trial_job_spec.worker_pool_specs[0].container_spec.args[0]",
        "argument-twice",
        "lr is a parameter of the study",
        severity="warning",
    )
    refused(
        with_args("--momentum=1"),
        "trial_job_spec.worker_pool_specs[0].container_spec.args[0]",
        "argument-twice",
        "momentum is a parameter of the study",
        severity="warning",
    )
    assert found(with_args("--lr-decay=0.1", "--epochs=3")) == []


def test_what_only_vizier_takes_is_a_warning() -> None:
    path = "study_spec.observation_noise"
    refused(study(observation_noise="LOW"), path, "study-unsupported", "Vizier", severity="warning")
    started = replace(LAYERS, integer_value_spec=IntegerValueSpec(min_value=2, max_value=8, default_value=4))
    path = "study_spec.parameters[0].integer_value_spec.default_value"
    refused(study(parameters=(started,)), path, "study-unsupported", severity="warning")


def test_faults_of_the_trial_job_are_told_below_it() -> None:
    refused(
        replace(GOOD, trial_job_spec=job(pool(replicas=2))),
        "trial_job_spec.worker_pool_specs[0].replica_count",
        "primary-replicas",
    )
