"""Job specs: pools in their roles, and what Vertex would refuse is refused here."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJobSpec

from penstock_components.jobs.pools import Container, JobSpecError, Machine, WorkerPool
from penstock_components.jobs.reduction_server import (
    ReductionServer,
    advice,
    image_uri,
    reducers_needed,
    ring_gain,
)
from penstock_components.jobs.spec import Scheduling, TrainingJob
from penstock_components.machines.catalogue import MachineError

A100 = Machine(machine_type="a2-highgpu-8g", accelerator_type="NVIDIA_TESLA_A100", accelerator_count=8)


def job(**changes: Any) -> TrainingJob:
    container = Container(image_uri="img", args=("--a=b",), env={"B": "2", "A": "1"})
    return TrainingJob(
        **({"machine": A100, "num_nodes": 4, "container": container, "location": "europe-west4"} | changes)
    )


def test_reducers_stand_at_index_2_behind_primary_and_workers() -> None:
    pools = job(reduction_server=ReductionServer(replica_count=13)).pools
    assert [pool.replica_count for pool in pools] == [1, 3, 13]
    assert pools[2].container.image_uri.startswith("europe-docker.pkg.dev/vertex-ai-restricted/")
    assert not pools[2].machine.accelerator_type


def test_no_pool_is_ever_empty() -> None:
    assert [pool.replica_count for pool in job(num_nodes=1).pools] == [1]
    assert [pool.replica_count for pool in job(num_nodes=2).pools] == [1, 1]
    with pytest.raises(JobSpecError, match="leave the pool out"):
        WorkerPool(machine=A100, replica_count=0, container=Container(image_uri="img"))


def test_the_pools_are_what_the_api_takes() -> None:
    spec = job(reduction_server=ReductionServer(replica_count=2)).to_gcpc()
    parsed = CustomJobSpec(worker_pool_specs=spec["worker_pool_specs"])
    assert parsed.worker_pool_specs[0].machine_spec.accelerator_count == 8
    assert [variable.name for variable in parsed.worker_pool_specs[1].container_spec.env] == ["A", "B"]
    assert parsed.worker_pool_specs[2].machine_spec.machine_type == "n1-highcpu-16"


def test_nccl_jobs_restart_whole_by_default() -> None:
    assert job().to_gcpc()["restart_job_on_worker_restart"] is True
    assert job().to_gcpc()["strategy"] == "STANDARD"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: job(num_nodes=1, reduction_server=ReductionServer(replica_count=1)), "at least 2 nodes"),
        (
            lambda: job(
                reduction_server=ReductionServer(replica_count=1),
                scheduling=Scheduling(strategy="FLEX_START"),
            ),
            "FLEX_START wants the same machine in all pools",
        ),
        (lambda: job(num_nodes=0), "num_nodes 0"),
        (lambda: Scheduling(timeout_seconds=8 * 24 * 3600), "7 days"),
        (lambda: Machine(machine_type="n1-standard-4", accelerator_count=1), "go together"),
        (lambda: Machine(machine_type="n1-standard-4", boot_disk_type="pd-extreme"), "pd-ssd, pd-standard"),
        (lambda: Machine(machine_type="n1-standard-4", boot_disk_gb=10), "100 to 64000"),
        (lambda: Container(image_uri=""), "image_uri is empty"),
        (lambda: Container(image_uri="i", env={str(n): "" for n in range(101)}), "at most 100"),
        (lambda: image_uri("mars-north1"), "none of the regions"),
    ],
)
def test_what_vertex_would_refuse_is_refused_here(build: Any, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        build()


@pytest.mark.parametrize(
    ("machine", "accelerator", "count", "message"),
    [
        ("n1-highmem-16", "NVIDIA_TESLA_A100", 8, "It carries .*For NVIDIA_TESLA_A100 use a2-"),
        ("a2-highgpu-8g", "NVIDIA_TESLA_A100", 4, "does not carry 4 x NVIDIA_TESLA_A100. It carries 8 x"),
        ("a2-highgpu-9g", "NVIDIA_TESLA_A100", 8, "Did you mean a2-highgpu-"),
    ],
)
def test_accelerators_that_a_machine_does_not_carry_are_refused(
    machine: str, accelerator: str, count: int, message: str
) -> None:
    with pytest.raises(MachineError, match=message):
        Machine(machine_type=machine, accelerator_type=accelerator, accelerator_count=count)


@pytest.mark.parametrize(("nodes", "gain"), [(2, 1.0), (4, 1.5), (8, 1.75), (16, 1.875)])
def test_the_gain_over_a_ring_is_2_n_minus_1_over_n(nodes: int, gain: float) -> None:
    assert ring_gain(nodes) == gain


@pytest.mark.parametrize(
    ("nodes", "gbps", "needed"),
    [(5, 100, 16), (8, 100, 25), (4, 100, 13), (2, 24, 2)],  # the first two are Google's own examples
)
def test_reducers_needed_reach_the_nodes_bandwidth(nodes: int, gbps: float, needed: int) -> None:
    assert reducers_needed(nodes, gbps, 32) == needed


@pytest.mark.parametrize(
    ("reducers", "nodes", "told"),
    [
        (7, 2, "brings nothing"),
        (1, 2, "0.16x as fast as a ring; 7 x n1-highcpu-16"),
        (2, 4, "0.24x as fast as a ring; 13 x n1-highcpu-16"),  # what the seeds advise
        (24, 8, "up to 1.68x"),
        (13, 4, "up to 1.50x"),
    ],
)
def test_advice_says_what_reducers_bring(reducers: int, nodes: int, told: str) -> None:
    assert told in advice(ReductionServer(replica_count=reducers), machine=A100, num_nodes=nodes)


def test_a_reducer_machine_that_is_not_recommended_is_refused() -> None:
    with pytest.raises(MachineError, match="n1-highcpu-16"):
        ReductionServer(replica_count=1, machine_type="e2-small").pool("us-central1")
