"""Machines that do not exist, accelerators that they do not carry, reservations and TPU slices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_components.jobs.messages import EnvVar, ReservationAffinity, Scheduling
from penstock_components.machines.catalogue import catalogue_date
from unit.penstock_components.jobs.rules.specs import (
    A100,
    AT,
    GB200,
    H100,
    L4,
    OUTPUT,
    PACKAGE,
    RESTARTS,
    TPU,
    container,
    findings,
    gpu,
    job,
    nodes,
    pool,
    refused,
    warned,
    with_env,
)


def test_a_pool_needs_a_machine_type() -> None:
    refused(job(pool(None)), f"{AT}.machine_type", "required", "missing", "n1-standard-8")


def test_a_persistent_resource_knows_its_machines() -> None:
    assert findings(job(pool(None), persistent_resource_id="shared")) == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("n1-standard-7", "n1-standard-"),
        ("a2-highgpu-8", "a2-highgpu-8g"),
        ("a3-edgegpu-8g", "a3-megagpu-8g"),
    ],
)
def test_an_unknown_machine_yields_only_that_and_the_nearest_names(name: str, nearest: str) -> None:
    refused(
        job(pool(gpu(name, "NVIDIA_TESLA_A100", 3))),
        f"{AT}.machine_type",
        "machine-type",
        repr(name),
        f"catalogue of {catalogue_date()}",
        "Did you mean",
        nearest,
    )


def test_a_name_like_no_other_is_sent_to_the_documentation() -> None:
    refused(job(pool(gpu("zzz"))), f"{AT}.machine_type", "machine-type", "configure-compute")


@pytest.mark.parametrize("field", ["machine_type", "tpu_topology"])
def test_a_placeholder_for_a_machine_is_refused_with_the_reason(field: str) -> None:
    placeholder = "{{$.inputs.parameters['machine']}}"
    spec = job(pool(replace(TPU, **{field: placeholder})))
    refused(spec, f"{AT}.{field}", "placeholder", placeholder, "decided when the pipeline is compiled")


@pytest.mark.parametrize("accelerator", ["NVIDIA_TESLA_A100", "NVIDIA_H100_80GB"])
def test_a100_and_h100_are_never_on_n1(accelerator: str) -> None:
    refused(
        job(pool(gpu("n1-highmem-16", accelerator, 8))),
        f"{AT}.accelerator_type",
        "accelerator-type",
        f"n1-highmem-16 does not carry 8 x {accelerator}",
        f"For {accelerator} use a",
    )


def test_a_count_that_a_machine_does_not_have_is_refused_with_the_one_it_has() -> None:
    refused(
        job(pool(replace(A100, accelerator_count=4))),
        f"{AT}.accelerator_count",
        "accelerator-count",
        "does not carry 4 x NVIDIA_TESLA_A100",
        "a2-highgpu-4g",
        "Write accelerator_type NVIDIA_TESLA_A100 and accelerator_count 8.",
    )


def test_a_missing_count_is_told_at_the_count() -> None:
    refused(
        job(pool(replace(L4, accelerator_count=0))),
        f"{AT}.accelerator_count",
        "accelerator-count",
        "missing beside NVIDIA_L4",
        "accelerator_count 2",
    )


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("a2-highgpu-1g", "1 x NVIDIA_TESLA_A100"),
        ("a3-megagpu-8g", "8 x NVIDIA_H100_MEGA_80GB"),
        ("a4-highgpu-8g", "8 x NVIDIA_B200"),
        ("g2-standard-12", "1 x NVIDIA_L4"),
        ("g4-standard-48", "1 x NVIDIA_RTX_PRO_6000"),
    ],
)
def test_a_machine_that_always_has_gpus_wants_them_named(name: str, whole: str) -> None:
    count, _, kind = whole.partition(" x ")
    refused(
        job(pool(gpu(name))),
        f"{AT}.accelerator_type",
        "accelerator-missing",
        f"{name} always has {whole}",
        f"Write accelerator_type {kind} and accelerator_count {count}.",
    )


def test_a_count_alone_is_refused() -> None:
    refused(
        job(pool(gpu("n1-standard-8", count=2))),
        f"{AT}.accelerator_type",
        "accelerator-missing",
        "no accelerator_type",
    )


def test_a_cpu_machine_carries_no_accelerators() -> None:
    refused(
        job(pool(gpu("e2-standard-8", "NVIDIA_L4", 1))),
        f"{AT}.accelerator_type",
        "accelerator-type",
        "'e2-standard-8' is not a GPU machine type",
        "For NVIDIA_L4 use g2-standard",
    )


def test_k80_is_gone() -> None:
    refused(
        job(pool(gpu("n1-standard-8", "NVIDIA_TESLA_K80", 1))),
        f"{AT}.accelerator_type",
        "accelerator-gone",
        "not to be had any more",
        "NVIDIA_TESLA_T4",
    )


def test_p100_ends_and_that_is_a_warning_with_the_day() -> None:
    spec = job(pool(gpu("n1-standard-8", "NVIDIA_TESLA_P100", 1)))
    warned(spec, f"{AT}.accelerator_type", "accelerator-end-of-support", "2026-09-15", "NVIDIA_L4")


@pytest.mark.parametrize("count", [0, 8])
def test_a_share_of_a_gpu_goes_with_one_gpu(count: int) -> None:
    spec = job(pool(replace(A100, accelerator_count=count, gpu_partition_size="1g.5gb")))
    refused(spec, f"{AT}.accelerator_count", "gpu-partition", f"not {count}", "Write 1")


def test_a_share_of_no_gpu_is_refused() -> None:
    spec = job(pool(gpu("n1-standard-8", gpu_partition_size="1g.5gb")))
    refused(spec, f"{AT}.accelerator_type", "accelerator-missing", "gpu_partition_size")


def test_a_topology_on_a_machine_without_tpu_is_refused() -> None:
    refused(job(pool(replace(L4, tpu_topology="2x2"))), f"{AT}.tpu_topology", "tpu-topology", "no TPU")


def test_a_region_without_the_accelerator_is_a_warning_that_names_its_regions() -> None:
    mega = gpu("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8)
    warned(
        job(pool(mega)),
        f"{AT}.accelerator_type",
        "region",
        "quota page",
        "us-east4",
        location="europe-west9",
    )
    assert findings(job(pool(mega)), location="us-east4") == []
    assert findings(job(pool(mega))) == []


def test_a_small_h100_is_had_as_spot_or_flex_start_only() -> None:
    small = gpu("a3-highgpu-1g", "NVIDIA_H100_80GB", 1)
    warned(job(pool(small)), f"{AT}.machine_type", "machine-consumption", "STANDARD", "SPOT or FLEX_START")
    spot = Scheduling(strategy="SPOT")
    assert findings(job(pool(small), scheduling=spot, base_output_directory=OUTPUT)) == []


def test_gb200_needs_a_reservation() -> None:
    spec = job(pool(replace(GB200, reservation_affinity=None)))
    path = f"{AT}.reservation_affinity"
    refused(spec, path, "reservation-needed", "a4x-highgpu-4g", "SPECIFIC_RESERVATION")
    none = ReservationAffinity(reservation_affinity_type="NO_RESERVATION")
    refused(job(pool(replace(GB200, reservation_affinity=none))), path, "reservation-needed")


def test_network_settings_of_other_machines_are_refused() -> None:
    env = (EnvVar(name="NCCL_IB_HCA", value="mlx5"),)
    spec = job(pool(A100, container_spec=container(env=env)))
    refused(spec, "worker_pool_specs[0].container_spec.env[0]", "env-network", "a2-highgpu-8g", "Remove it")


def test_ranks_set_by_hand_are_refused_where_there_are_several_replicas() -> None:
    env = (EnvVar(name="RANK", value="0"),)
    spec = nodes(L4, 2)
    workers = replace(spec.worker_pool_specs[1], container_spec=container(env=env))
    several = replace(spec, worker_pool_specs=(spec.worker_pool_specs[0], workers))
    path = "worker_pool_specs[1].container_spec.env[0]"
    refused(several, path, "env-of-the-launcher", "RANK=0", "CLUSTER_SPEC")
    assert findings(with_env(RANK="0")) == []


def test_every_strategy_takes_a_whole_h100_machine() -> None:
    for strategy in ("STANDARD", "SPOT", "FLEX_START"):
        assert findings(nodes(H100, 2, scheduling=replace(RESTARTS, strategy=strategy))) == []


B200 = gpu("a4-highgpu-8g", "NVIDIA_B200", 8)
GIB = "/usr/local/gib/scripts/set_nccl_env.sh"


def test_nodes_with_gib_are_warned_once_where_nothing_sources_its_script() -> None:
    at = "worker_pool_specs[0]"
    warned(nodes(B200, 4), f"{at}.container_spec", "network-set-up", GIB, "cannot be seen")
    package = job(
        pool(B200, python_package_spec=PACKAGE),
        pool(B200, 3, python_package_spec=PACKAGE),
        scheduling=RESTARTS,
        base_output_directory=OUTPUT,
    )
    warned(package, f"{at}.python_package_spec", "network-set-up", GIB)
    assert findings(job(pool(B200))) == []


@pytest.mark.parametrize(
    "command", [("bash", "-c", f"source {GIB} && exec train"), ("/app/start.sh", "/usr/local/gib/lib64")]
)
def test_nodes_that_speak_of_gib_are_left_alone(command: tuple[str, ...]) -> None:
    program = container(command=command)
    spec = job(
        pool(B200, container_spec=program),
        pool(B200, 3, container_spec=program),
        scheduling=RESTARTS,
        base_output_directory=OUTPUT,
    )
    assert findings(spec) == []


def test_tf_config_by_hand_is_a_fault_where_the_service_sets_it_and_no_other() -> None:
    assert findings(with_env(TF_CONFIG="{}")) == []
    program = container(env=(EnvVar(name="TF_CONFIG", value="{}"),))
    spec = job(pool(container_spec=program), pool())
    refused(spec, "worker_pool_specs[0].container_spec.env[0]", "env-of-the-service", "TF_CONFIG is set by")


@pytest.mark.parametrize("text", ["", "{{$.inputs.parameters['held']}}"])
def test_machines_that_a_persistent_resource_of_the_run_may_hold_are_not_judged_before_it(text: str) -> None:
    later = {"unknown": frozenset({"persistent_resource_id"})} if not text else {}
    assert findings(job(pool(None), persistent_resource_id=text), **later) == []
    spec = job(pool(replace(GB200, reservation_affinity=None)), persistent_resource_id=text)
    assert findings(spec, **later) == []


def test_a_strategy_of_the_run_may_be_the_one_that_a_small_h100_needs() -> None:
    small = job(pool(gpu("a3-highgpu-1g", "NVIDIA_H100_80GB", 1)))
    assert findings(small, unknown=frozenset({"scheduling.strategy"})) == []
