"""TPU slices that cannot be had, one fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_components.jobs.messages import MachineSpec, Scheduling
from unit.penstock_components.jobs.rules.specs import AT, OUTPUT, TPU, findings, gpu, job, pool, refused


def test_a_tpu_slice_is_one_replica() -> None:
    refused(
        job(pool(TPU, 2)),
        "worker_pool_specs[0].replica_count",
        "tpu-replicas",
        "2 replicas",
        "larger tpu_topology",
    )


def test_a_tpu_job_has_one_pool() -> None:
    spec = job(pool(TPU), pool(TPU))
    refused(spec, f"{AT}.machine_type", "tpu-pools", "2 pools", "exactly one")


def test_each_pool_of_tpus_is_told_its_replicas_and_their_number_once() -> None:
    spec = job(pool(TPU), pool(TPU, 2), pool(TPU, 3))
    assert [(each.rule, each.path) for each in findings(spec)] == [
        ("tpu-pools", f"{AT}.machine_type"),
        ("tpu-replicas", "worker_pool_specs[1].replica_count"),
        ("tpu-replicas", "worker_pool_specs[2].replica_count"),
    ]


@pytest.mark.parametrize(("topology", "word"), [("3x3", "2x2, 2x4, 4x4"), ("", "no tpu_topology")])
def test_a_topology_that_a_tpu_does_not_take_is_refused_with_those_it_takes(topology: str, word: str) -> None:
    spec = job(pool(replace(TPU, tpu_topology=topology)))
    refused(spec, f"{AT}.tpu_topology", "tpu-topology", "ct5lp-hightpu-4t", word)


@pytest.mark.parametrize(
    "machine",
    [
        replace(TPU, accelerator_type="TPU_V5_LITEPOD", accelerator_count=4),
        gpu("ct6e-standard-4t", "TPU_V5_LITEPOD", 1, tpu_topology="2x2"),
        gpu("tpu7x-standard-4t", "TPU_V4_POD", 0, tpu_topology="2x2x1"),
    ],
)
def test_newer_tpus_take_no_accelerator_fields(machine: MachineSpec) -> None:
    refused(job(pool(machine)), f"{AT}.accelerator_type", "tpu-accelerator", "Remove them")


@pytest.mark.parametrize(
    ("machine", "field", "rule"),
    [
        (gpu("cloud-tpu", "TPU_V2", 9), "accelerator_count", "accelerator-count"),
        (gpu("cloud-tpu", "TPU_V4_POD", 8), "accelerator_type", "accelerator-type"),
        (gpu("cloud-tpu", "TPU_V2", 8, tpu_topology="2x2"), "tpu_topology", "tpu-topology"),
    ],
)
def test_older_tpus_count_cores(machine: MachineSpec, field: str, rule: str) -> None:
    refused(job(pool(machine)), f"{AT}.{field}", rule, "cloud-tpu")


@pytest.mark.parametrize(
    ("machine", "is_pod"),
    [(TPU, True), (gpu("cloud-tpu", "TPU_V3", 32), True), (replace(TPU, tpu_topology="2x2"), False)],
)
def test_tpu_pods_are_not_had_as_spot(machine: MachineSpec, is_pod: bool) -> None:
    spec = job(pool(machine), scheduling=Scheduling(strategy="SPOT"), base_output_directory=OUTPUT)
    if is_pod:
        refused(spec, "scheduling.strategy", "spot-tpu-pod", "TPU Pod")
    else:
        assert findings(spec) == []
