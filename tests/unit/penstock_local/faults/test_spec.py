"""Orders for faults: what is taken, and what a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_local.faults.spec import (
    Damage,
    FaultError,
    LateStart,
    Preemption,
    ProcessFault,
    StorageFault,
    Trigger,
    parse_order,
)


def parsed(*faults: Any) -> Any:
    return parse_order({"labels": {"run": "one"}, "faults": list(faults)}).faults


def refusal(*faults: Any) -> str:
    with pytest.raises(FaultError) as caught:
        parsed(*faults)
    return str(caught.value)


def test_each_kind_of_fault_is_read_with_its_defaults() -> None:
    kill, preempt, late, storage, damage = parsed(
        {"do": "kill", "command": "rank", "environment": {"RANK": "1"}, "at_step": 3},
        {"do": "preempt", "replica": "workerpool1-0", "after_seconds": 2},
        {"do": "delay-start", "replica": "workerpool1-0", "seconds": 60},
        {"do": "storage", "kind": "read-only", "match": "checkpoints/", "at_start": True},
        {"do": "damage", "how": "flip", "match": r"\.distcp$", "at_step": 3},
    )
    assert isinstance(kill, ProcessFault)
    assert (kill.harm, kill.when, kill.environment) == ("kill", Trigger(at_step=3), {"RANK": "1"})
    assert isinstance(preempt, Preemption)
    assert (preempt.when.after_seconds, preempt.notice_seconds) == (2, 0)
    assert isinstance(late, LateStart)
    assert late.when.at_start
    assert isinstance(storage, StorageFault)
    assert (storage.only, storage.requests) == ("writes", None)
    assert isinstance(damage, Damage)
    assert damage.beside is None


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill", "faults[0] is 'kill'; it must be an object with named fields."),
        ({"do": "kil", "at_step": 1}, "faults[0].do is 'kil'; it must be one of kill, hang,"),
        ({"do": "kil", "at_step": 1}, "(did you mean 'kill'?)"),
        ({"do": "restart-job"}, "at_start and after_seconds: none given; give one of the three."),
        (
            {"do": "restart-job", "at_stp": 1},
            "none given; give one of the three. Is 'at_stp' to be 'at_step'?",
        ),
        (
            {"do": "restart-job", "at_step": 1, "at_start": True},
            "at_step, at_start given; give one of the three.",
        ),
        ({"do": "restart-job", "at_step": 0}, "faults[0].at_step is 0; it must be a whole number from 1 on."),
        ({"do": "restart-job", "at_step": True}, "it must be a whole number from 1 on."),
        (
            {"do": "restart-job", "after_seconds": "5"},
            "after_seconds is '5'; it must be a number from 0 on.",
        ),
        ({"do": "restart-job", "after_seconds": float("nan")}, "it must be a number from 0 on."),
        ({"do": "restart-job", "at_step": 1, "notice_second": 3}, "Did you mean 'notice_seconds'?"),
        ({"do": "preempt", "at_step": 1}, "faults[0].replica is missing"),
        ({"do": "preempt", "at_step": 1, "replica": "node 1"}, "such as 'workerpool1-0'"),
        (
            {"do": "delay-start", "replica": "workerpool1-0", "seconds": 1, "at_step": 3},
            "at_step is not a field here.",
        ),
        ({"do": "kill", "at_step": 1, "command": "("}, "it must be a regular expression, and is none"),
        ({"do": "kill", "at_step": 1, "command": "a", "environment": {"RANK": 1}}, "whose values are texts"),
        (
            {"do": "storage", "kind": "refuse", "status": 404, "at_step": 1},
            "status is 404; it must be one of 408, 429",
        ),
        ({"do": "storage", "kind": "slow", "status": 503, "at_step": 1}, "status is not a field here."),
        (
            {"do": "storage", "kind": "read-only", "only": "reads", "at_step": 1},
            "only is not a field here.",
        ),
        ({"do": "damage", "how": "burn", "match": "a", "at_step": 1}, "it must be one of flip, cut"),
    ],
)
def test_a_wrong_fault_is_refused_by_the_path_of_its_field(fault: Any, told: str) -> None:
    assert told in refusal(fault)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ([], "the body is []; it must be an object"),
        ({}, "faults is missing"),
        ({"faults": []}, "faults is []; it must be a list of at least one fault."),
        ({"faults": [{"do": "restart-job", "at_step": 1}], "label": {}}, "Did you mean 'labels'?"),
    ],
)
def test_an_order_without_faults_is_refused(order: Any, told: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_order(order)
    assert told in str(caught.value)


def test_the_second_fault_is_told_by_its_own_index() -> None:
    good = {"do": "restart-job", "at_step": 1}
    assert refusal(good, {"do": "nothing"}).startswith("faults[1].do is 'nothing'")
