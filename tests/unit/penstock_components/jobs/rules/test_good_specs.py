"""What Vertex AI takes is told nothing; what it is given at random raises nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_custom_job, check_job_spec, check_tuning_job
from penstock_components.jobs.schema import fields_of
from penstock_components.jobs.study import HyperparameterTuningJob
from unit.penstock_components.jobs.protos import messages
from unit.penstock_components.jobs.rules.specs import GOOD

SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
ODD: dict[type, tuple[Any, ...]] = {
    str: (
        "",
        " ",
        "\x00",
        "/",
        "..",
        "projects//",
        "gs://",
        "{{$.x}}",
        "{{x}}",
        "$A",
        "\u0661",
        "ct5lp-",
        "--=",
        "x" * 3000,
    ),
    int: (0, -1, 2**63 - 1),
    bool: (True, False),
    timedelta: (timedelta.min, timedelta(0), timedelta.max),
}
ODD_NAMES = ("", "?", "{{$.x}}", "STRATEGY_UNSPECIFIED")
"""Values that a rule must bear wherever they stand."""
CONTEXTS = strategies.builds(
    Context,
    location=strategies.sampled_from(["", "us-central1", "nowhere"]),
    strategy=strategies.sampled_from(["", "ddp", "zero3", "?"]),
    through_gcpc=strategies.booleans(),
)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_spec_has_no_error(name: str) -> None:
    spec, context = GOOD[name]
    assert [each.told() for each in check_job_spec(spec, context) if each.severity == "error"] == []


@SLOW
@given(messages(CustomJob), CONTEXTS)
def test_no_custom_job_makes_a_rule_raise(job: CustomJob, context: Context) -> None:
    for finding in check_custom_job(job, context):
        assert finding.rule
        assert finding.reason
        assert finding.fix


@SLOW
@given(messages(HyperparameterTuningJob), CONTEXTS)
def test_no_tuning_job_makes_a_rule_raise(job: HyperparameterTuningJob, context: Context) -> None:
    for finding in check_tuning_job(job, context):
        assert finding.path
        assert finding.reason
        assert finding.fix


def mutations(message: Message) -> Iterator[Any]:
    """The message with one value of it, at any depth, replaced by an odd one or left out."""
    for field in fields_of(type(message)):
        held = getattr(message, field.name)
        if field.is_repeated:
            yield replace(message, **{field.name: ()})
            yield replace(message, **{field.name: held * 101})
        elif field.has_presence:
            yield replace(message, **{field.name: None})
        for index, each in enumerate(held if field.is_repeated else (held,)):
            odd = ODD_NAMES if field.values else ODD.get(type(each), ())
            others = mutations(each) if isinstance(each, Message) else odd
            for other in others:
                value = (*held[:index], other, *held[index + 1 :]) if field.is_repeated else other
                yield replace(message, **{field.name: value})


@pytest.mark.parametrize("name", GOOD)
def test_a_good_spec_with_an_odd_value_anywhere_makes_no_rule_raise(name: str) -> None:
    spec, context = GOOD[name]
    for mutated in mutations(spec):
        for finding in check_job_spec(mutated, context):
            assert 0 < len(finding.reason) < 1000
            assert finding.fix


def test_an_empty_job_is_told_what_it_lacks() -> None:
    assert [each.path for each in check_custom_job(CustomJob(), Context())] == ["display_name", "job_spec"]
    assert [each.rule for each in check_job_spec(CustomJobSpec(), Context())] == ["pool-count"]
