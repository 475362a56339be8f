"""A job as the arguments of CustomTrainingJobOp, and what does not go through it."""

from __future__ import annotations

import pytest

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.gcpc import to_gcpc
from penstock_components.jobs.messages import CustomJob, WorkerPoolSpec
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_custom_job
from unit.penstock_components.jobs.rules.specs import job, pool


def of_pools(*pools: WorkerPoolSpec) -> CustomJob:
    return CustomJob(display_name="job", job_spec=job(*pools))


def test_empty_pools_at_the_end_are_left_out() -> None:
    told = to_gcpc(of_pools(pool(), pool(), WorkerPoolSpec(), WorkerPoolSpec()))
    assert told["worker_pool_specs"] == to_gcpc(of_pools(pool(), pool()))["worker_pool_specs"]
    assert len(told["worker_pool_specs"]) == 2


@pytest.mark.parametrize(
    "given", [(pool(), WorkerPoolSpec(), pool()), (pool(), *[WorkerPoolSpec()] * 2, pool())]
)
def test_empty_pools_before_others_are_refused_as_check_refuses_them(
    given: tuple[WorkerPoolSpec, ...],
) -> None:
    with pytest.raises(
        JobSpecError, match=rf"pool {len(given) - 1} would become pool 1 \(workers\)"
    ) as caught:
        to_gcpc(of_pools(*given))
    checked = check_custom_job(of_pools(*given), Context(through_gcpc=True))
    assert list(caught.value.findings) == checked


def test_an_empty_primary_is_refused_too() -> None:
    with pytest.raises(JobSpecError, match=r"pool 1 would become pool 0 \(primary\)"):
        to_gcpc(of_pools(WorkerPoolSpec(), pool()))
