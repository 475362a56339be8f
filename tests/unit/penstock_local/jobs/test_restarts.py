from __future__ import annotations

import pytest

from penstock_local.jobs.restarts import (
    MAX_JOB_RETRIES,
    MAX_PREEMPTIONS,
    MAX_REPLICA_RESTARTS,
    Action,
    RestartPolicy,
    is_transient,
)


def decide(policy: RestartPolicy, exit_code: int, replica: str = "workerpool1-0") -> Action:
    return policy.decide(replica=replica, is_primary=replica == "workerpool0-0", exit_code=exit_code)


def policy(*, whole_job: bool = False, disable_retries: bool = False) -> RestartPolicy:
    return RestartPolicy(restart_job_on_worker_restart=whole_job, disable_retries=disable_retries)


@pytest.mark.parametrize(
    ("replica", "exit_code", "alone", "whole_job", "without_retries"),
    [
        ("workerpool0-0", 0, Action.SUCCEED, Action.SUCCEED, Action.SUCCEED),
        ("workerpool1-0", 0, Action.NOTHING, Action.NOTHING, Action.NOTHING),
        ("workerpool0-0", 1, Action.FAIL, Action.FAIL, Action.FAIL),
        ("workerpool1-0", 2, Action.FAIL, Action.FAIL, Action.FAIL),
        ("workerpool1-0", 255, Action.FAIL, Action.FAIL, Action.FAIL),
        ("workerpool1-0", 128, Action.FAIL, Action.FAIL, Action.FAIL),
        ("workerpool1-0", 6, Action.RESTART_JOB, Action.RESTART_JOB, Action.FAIL),
        ("workerpool1-0", 11, Action.RESTART_JOB, Action.RESTART_JOB, Action.FAIL),
        ("workerpool0-0", 134, Action.RESTART_JOB, Action.RESTART_JOB, Action.FAIL),
        ("workerpool1-0", 139, Action.RESTART_JOB, Action.RESTART_JOB, Action.FAIL),
        ("workerpool1-0", 137, Action.RESTART_REPLICA, Action.RESTART_JOB, Action.FAIL),
        ("workerpool0-0", 143, Action.RESTART_REPLICA, Action.RESTART_JOB, Action.FAIL),
    ],
)
def test_the_end_of_a_replica_is_followed_by_what_is_documented(
    replica: str, exit_code: int, alone: Action, whole_job: Action, without_retries: Action
) -> None:
    assert decide(policy(), exit_code, replica) is alone
    assert decide(policy(whole_job=True), exit_code, replica) is whole_job
    assert decide(policy(whole_job=True, disable_retries=True), exit_code, replica) is without_retries


def test_a_replica_restarts_five_times_before_the_whole_job_does() -> None:
    told = policy()
    assert [decide(told, 137) for _ in range(MAX_REPLICA_RESTARTS + 1)] == [
        *[Action.RESTART_REPLICA] * MAX_REPLICA_RESTARTS,
        Action.RESTART_JOB,
    ]
    assert decide(told, 137) is Action.RESTART_REPLICA  # the new attempt counts from none


def test_each_replica_has_a_count_of_its_own() -> None:
    told = policy()
    for _ in range(MAX_REPLICA_RESTARTS):
        decide(told, 137, "workerpool1-0")
    assert decide(told, 137, "workerpool1-1") is Action.RESTART_REPLICA
    assert decide(told, 137, "workerpool1-0") is Action.RESTART_JOB


def test_a_job_is_retried_three_times_and_then_fails() -> None:
    told = policy()
    assert [decide(told, 134) for _ in range(MAX_JOB_RETRIES + 1)] == [
        *[Action.RESTART_JOB] * MAX_JOB_RETRIES,
        Action.FAIL,
    ]


@pytest.mark.parametrize("whole_job", [True, False])
def test_a_replica_that_is_always_killed_ends_the_job_at_last(whole_job: bool) -> None:
    told = policy(whole_job=whole_job)
    actions = [decide(told, 137) for _ in range((MAX_REPLICA_RESTARTS + 1) * (MAX_JOB_RETRIES + 1))]
    assert actions.index(Action.FAIL) == len(actions) - 1


@pytest.mark.parametrize(
    ("exit_code", "expected"), [(0, False), (1, False), (6, True), (130, True), (192, True), (193, False)]
)
def test_only_aborts_and_signals_are_transient(exit_code: int, expected: bool) -> None:
    assert is_transient(exit_code) is expected


def test_a_job_survives_six_preemptions_whatever_else_befalls_it() -> None:
    tried = policy()
    for _ in range(MAX_JOB_RETRIES):
        assert decide(tried, 134) is Action.RESTART_JOB
    assert [tried.preempted() for _ in range(MAX_PREEMPTIONS)] == [Action.RESTART_JOB] * 6
    assert tried.preempted() is Action.FAIL
    assert policy(disable_retries=True).preempted() is Action.FAIL
