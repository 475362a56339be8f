"""The catalogue: what Vertex AI trains on, and what is said of names that it does not have."""

from __future__ import annotations

import re

import pytest

from penstock_components.jobs.messages import ACCELERATOR_TYPES
from penstock_components.machines.catalogue import (
    FLEX_START_ACCELERATORS,
    MachineError,
    catalogue_date,
    compute_engine_regions,
    cpu_machine,
    gpu_machine,
    gpu_machines,
    implied_accelerator,
    is_cpu_machine,
    kind_of,
    legacy_tpu,
    legacy_tpus,
    nearest,
    reducer_network_gbps,
    regions_of,
    tpu_machine,
    tpu_machines,
)
from penstock_components.machines.names import cpu_names
from penstock_components.machines.tables import tables


def test_every_table_has_a_source_and_the_whole_a_date() -> None:
    described = {"date", "sources", "units", "compute_engine_date"}
    assert set(tables()["sources"]) == set(tables()) - described
    assert all(text for texts in tables()["sources"].values() for text in texts)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", catalogue_date())


def test_every_accelerator_is_one_of_the_apis() -> None:
    carried = {row.accelerator_type for row in gpu_machines()} | {
        row.accelerator_type for row in legacy_tpus()
    }
    assert carried | FLEX_START_ACCELERATORS <= set(ACCELERATOR_TYPES)
    assert {row.accelerator_type for row in gpu_machines()} >= FLEX_START_ACCELERATORS


def test_no_pair_of_machine_and_accelerator_stands_twice() -> None:
    gpus = [(row.machine_type, row.accelerator_type) for row in gpu_machines()]
    tpus = [(row.machine_type, row.tpu_topology) for row in tpu_machines()]
    assert len(gpus) == len(set(gpus)) == 92
    assert len(tpus) == len(set(tpus)) == 27


def test_every_gpu_row_is_found_by_each_of_its_counts() -> None:
    for row in gpu_machines():
        for count in row.accelerator_counts:
            assert gpu_machine(row.machine_type, row.accelerator_type, count) is row


@pytest.mark.parametrize(
    ("machine", "accelerator", "count", "message"),
    [
        (
            "n1-highmem-16",
            "NVIDIA_TESLA_A100",
            8,
            "It carries .* For NVIDIA_TESLA_A100 use a2-highgpu-8g",
        ),
        (
            "a2-highgpu-8g",
            "NVIDIA_TESLA_A100",
            4,
            r"not carry 4 x .* It carries 8 x .* use a2-highgpu-4g\.",
        ),
        (
            "a2-highgpu-8g",
            "NVIDIA_TESLA_A100",
            3,
            r"use a2-highgpu-1g \(1\), a2-highgpu-2g \(2\)",
        ),
        ("a2-highgpu-9g", "NVIDIA_TESLA_A100", 8, "Did you mean a2-highgpu-"),
        ("A2_HighGPU-8g", "NVIDIA_TESLA_A100", 8, "Did you mean a2-highgpu-8g"),
        (
            "a2-highgpu-8g",
            "NVIDIA_A100_40GB",
            8,
            r"did you mean NVIDIA_A100_80GB \(80 GB\) or NVIDIA_TESLA_A100 \(40 GB\)",
        ),
        ("n1-standard-16", "NVIDIA_TESLA_V100", 1, "2 or 4 or 8 x NVIDIA_TESLA_V100"),
        ("g4-standard-6", "NVIDIA_RTX_PRO_6000", 1, "Compute Engine has it"),
    ],
)
def test_gpus_that_a_machine_does_not_carry_are_refused_with_what_was_meant(
    machine: str, accelerator: str, count: int, message: str
) -> None:
    with pytest.raises(MachineError, match=message):
        gpu_machine(machine, accelerator, count)


def test_a_machine_with_one_kind_of_gpu_implies_it() -> None:
    assert implied_accelerator("a2-highgpu-8g") == ("NVIDIA_TESLA_A100", 8)
    assert implied_accelerator("g2-standard-32") == ("NVIDIA_L4", 1)
    assert implied_accelerator("n1-highcpu-96") is None
    assert implied_accelerator("n2-standard-4") is None


def test_rows_say_how_a_machine_is_had_and_what_runs_on_it() -> None:
    rows = {row.machine_type: row for row in gpu_machines()}
    assert [name for name, row in rows.items() if row.needs_reservation] == ["a4x-highgpu-4g"]
    assert [name for name, row in rows.items() if row.architecture == "arm64"] == ["a4x-highgpu-4g"]
    assert rows["a4-highgpu-8g"].advised_consumption == "a reservation or Spot"
    assert rows["a3-highgpu-2g"].is_only_preemptible
    assert not rows["a3-highgpu-8g"].is_only_preemptible
    assert rows["a2-highgpu-8g"].advised_consumption == ""
    assert rows["a3-ultragpu-8g"].default_boot_disk == "hyperdisk-balanced"
    assert {row.accelerator_type for row in gpu_machines() if row.end_of_support} == {"NVIDIA_TESLA_P100"}


def test_chips_and_vms_of_a_slice_follow_from_its_topology() -> None:
    slice_ = tpu_machine("ct5lp-hightpu-4t", "4x8")
    assert (slice_.chips, slice_.vms, slice_.is_pod, slice_.generation) == (32, 8, True, "v5e")
    assert not tpu_machine("ct6e-standard-8t", "2x4").is_pod
    assert tpu_machine("tpu7x-standard-4t", "8x8x16").vms == 256


@pytest.mark.parametrize(
    ("machine", "topology", "message"),
    [
        ("ct6e-standard-4t", "1x1", r"It takes 2x2, 2x4, .* 1x1 is a topology of ct6e-standard-1t\."),
        ("ct6e-standard-4t", "", "with no tpu_topology"),
        ("ct6e", "2x2", "Did you mean ct6e-standard-1t"),
        ("cloud-tpu", "2x2", "accelerator_type TPU_V2 or TPU_V3"),
    ],
)
def test_slices_that_do_not_exist_are_refused_with_those_that_do(
    machine: str, topology: str, message: str
) -> None:
    with pytest.raises(MachineError, match=message):
        tpu_machine(machine, topology)


def test_older_tpus_count_cores() -> None:
    assert legacy_tpu("TPU_V2", 8).machine_type == "cloud-tpu"
    assert legacy_tpu("TPU_V2", 64).takes(64)
    assert legacy_tpu("TPU_V3", 32).accelerator_type == "TPU_V3"
    with pytest.raises(MachineError, match="It takes 8, or a multiple of 32 for a pod"):
        legacy_tpu("TPU_V2", 40)
    with pytest.raises(MachineError, match="newer TPUs have their own machine types"):
        legacy_tpu("TPU_V5_LITEPOD", 8)


def test_cpu_machines_have_an_egress_where_a_source_gives_it() -> None:
    assert (cpu_machine("n1-highcpu-16").vcpus, cpu_machine("n1-highcpu-16").network_gbps) == (16, 32)
    assert cpu_machine("n2-standard-8").network_gbps is None
    assert cpu_machine("m1-ultramem-160").vcpus == 160
    with pytest.raises(MachineError, match=r"n1-standard-1' is not a CPU machine type .* Did you mean n1-s"):
        cpu_machine("n1-standard-1")
    assert all(cpu_machine(name) for name in cpu_names())


def test_reducers_run_where_the_egress_is_known() -> None:
    assert reducer_network_gbps("n1-highcpu-16") == reducer_network_gbps("n2-highcpu-80") == 32
    for name in ("e2-standard-4", "g2-standard-8", "?"):
        with pytest.raises(MachineError, match="n1-highcpu-16 or n2-highcpu-16"):
            reducer_network_gbps(name)


def test_n1_is_a_cpu_machine_until_an_accelerator_is_asked_for() -> None:
    assert kind_of("n1-standard-8") == "cpu"
    assert kind_of("n1-standard-8", "NVIDIA_TESLA_T4") == "gpu"
    assert is_cpu_machine("n1-standard-8")
    assert kind_of("g2-standard-8") == "gpu"
    assert not is_cpu_machine("g2-standard-8")
    assert kind_of("n2-standard-8", "NVIDIA_TESLA_T4") == "cpu"
    assert kind_of("cloud-tpu") == kind_of("ct6e-standard-8t") == "tpu"
    assert kind_of("p4d.24xlarge") is None


def test_the_nearest_names_are_those_that_begin_so_or_look_so() -> None:
    assert nearest("a3-highgpu-8") == ["a3-highgpu-8g", "a4-highgpu-8g", "a3-highgpu-4g"]
    assert nearest("ct6e") == ["ct6e-standard-1t", "ct6e-standard-4t", "ct6e-standard-8t"]
    assert nearest("p4d.24xlarge") == []


def test_regions_of_the_quota_page_and_of_compute_engine_are_two_things() -> None:
    assert regions_of("NVIDIA_GB200") == ("us-central1",)
    assert regions_of("tpu7x-standard-4t") == ("us-central1",)
    assert len(regions_of("NVIDIA_H100_MEGA_80GB") or ()) == 10
    assert regions_of("NVIDIA_L4") is None
    assert compute_engine_regions("g2-standard-8") is None
