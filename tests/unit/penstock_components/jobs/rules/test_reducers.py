"""A Reduction Server among the other rules: one finding for one fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_components.jobs.messages import ContainerSpec, CustomJobSpec, MachineSpec, WorkerPoolSpec
from unit.penstock_components.jobs.rules.specs import (
    A100,
    REDUCED,
    REDUCERS,
    RESTARTS,
    findings,
    refused,
    warned,
)

PRIMARY, WORKERS, SERVERS = REDUCED.worker_pool_specs


def reduced(workers: WorkerPoolSpec = WORKERS, **changes: Any) -> CustomJobSpec:
    return replace(REDUCED, worker_pool_specs=(PRIMARY, workers, replace(SERVERS, **changes)))


def test_reducers_of_the_right_number_on_eight_nodes_are_told_nothing() -> None:
    assert findings(REDUCED, location="europe-west4", strategy="ddp") == []
    assert findings(REDUCED) == []


def test_reducers_at_index_1_are_refused_with_their_place() -> None:
    spec = replace(REDUCED, worker_pool_specs=(PRIMARY, SERVERS))
    refused(spec, "worker_pool_specs[1]", "reducers-place", "index 2", strategy="ddp")


def test_reducers_need_nodes_in_pool_1() -> None:
    spec = reduced(WorkerPoolSpec())
    refused(spec, "worker_pool_specs[1]", "reducers-nodes", "at least 2 nodes")


def test_reducers_behind_an_empty_pool_move_to_the_workers_through_gcpc() -> None:
    spec = reduced(WorkerPoolSpec())
    path = "worker_pool_specs[1]"
    refused(spec, path, "empty-pool-through-gcpc", "pool 2 would become pool 1 (workers)", through_gcpc=True)


def test_reducers_have_no_accelerators() -> None:
    machine = MachineSpec(
        machine_type="n1-highcpu-16", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1
    )
    refused(
        reduced(machine_spec=machine),
        "worker_pool_specs[2].machine_spec",
        "reducers-accelerator",
        "no accelerator",
    )


COPY = REDUCERS.replace("vertex-ai-restricted", "mine")


def test_reducers_run_one_of_googles_three_images() -> None:
    path = "worker_pool_specs[2].container_spec.image_uri"
    other_tag = reduced(container_spec=ContainerSpec(image_uri=f"{REDUCERS.removesuffix(':latest')}:1.0"))
    refused(other_tag, path, "reducers-image", "three images", REDUCERS, location="europe-west4")
    copy = reduced(container_spec=ContainerSpec(image_uri=COPY))
    refused(copy, path, "reducers-image", "three images", location="europe-west4", strategy="ddp")


def test_an_image_named_like_the_reducer_is_a_warning_and_one_that_only_contains_the_name_is_nothing() -> (
    None
):
    path = "worker_pool_specs[2].container_spec.image_uri"
    for image in (COPY, "gcr.io/mine/reduction-server@sha256:1"):
        spec = reduced(container_spec=ContainerSpec(image_uri=image, command=("serve",)))
        warned(spec, path, "reducers-image", "named like the reducer")
    for image in (
        "gcr.io/shop/video-reduction-server:3",
        "gcr.io/reduction-server/encoder",
        "gcr.io/r:reduction-server",
    ):
        assert findings(reduced(container_spec=ContainerSpec(image_uri=image, args=("--port=1",)))) == []


def test_reducers_of_a_run_that_may_be_flex_start_are_not_judged_by_it() -> None:
    spec = replace(REDUCED, scheduling=replace(RESTARTS, strategy="FLEX_START"))
    assert findings(spec, unknown=frozenset({"scheduling.strategy"})) == []


def test_too_few_reducers_are_a_warning_with_the_number_that_reaches_the_nodes_bandwidth() -> None:
    path = "worker_pool_specs[2].replica_count"
    warned(reduced(replica_count=2), path, "reducers-too-few", "64 of the nodes' 800 Gbit/s", "to 25")


@pytest.mark.parametrize("strategy", ["zero3", "fsdp-full"])
def test_reducers_bring_nothing_to_strategies_without_all_reduce(strategy: str) -> None:
    path = "worker_pool_specs[2]"
    warned(REDUCED, path, "reducers-bring-nothing", strategy, "Leave the pool out", strategy=strategy)


def test_reducers_bring_nothing_on_two_nodes() -> None:
    spec = reduced(replace(WORKERS, replica_count=1), replica_count=7)
    warned(spec, "worker_pool_specs[2]", "reducers-bring-nothing")


def test_reducers_and_flex_start_exclude_each_other_and_that_is_told_once() -> None:
    spec = replace(REDUCED, scheduling=replace(RESTARTS, strategy="FLEX_START"))
    for strategy in ("", "ddp"):
        refused(spec, "scheduling.strategy", "reducers-flex-start", "same machine", strategy=strategy)


def test_an_unknown_machine_of_reducers_or_nodes_yields_only_that() -> None:
    unknown = MachineSpec(machine_type="n1-highcpu-17")
    path = "machine_spec.machine_type"
    refused(reduced(machine_spec=unknown), f"worker_pool_specs[2].{path}", "machine-type", "n1-highcpu-16")
    workers = replace(WORKERS, machine_spec=replace(A100, machine_type="a2-highgpu-9g"))
    refused(reduced(workers), f"worker_pool_specs[1].{path}", "machine-type", "a2-highgpu-8g")


def test_a_missing_image_of_reducers_is_told_once() -> None:
    path = "worker_pool_specs[2].container_spec.image_uri"
    refused(reduced(container_spec=ContainerSpec()), path, "required", strategy="ddp")
