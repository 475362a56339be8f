"""Topology: pools from a machine and a count, and the network set-up that a family needs and no other."""

from __future__ import annotations

import subprocess

import pytest

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import ContainerSpec, DiskSpec, EnvVar, MachineSpec, PythonPackageSpec
from penstock_components.jobs.topology import network_gbps, nodes, settings_that_do_not_apply
from penstock_components.machines.catalogue import MachineError, gpu_machines

PROGRAM = ContainerSpec(image_uri="trainer", command=("python", "-m", "trainer"))
GIB = "/usr/local/gib/scripts/set_nccl_env.sh"


def test_pool_0_has_one_replica_and_pool_1_the_others() -> None:
    topology = nodes("a2-highgpu-8g", 4)
    first, second = topology.pools(PROGRAM, disk=DiskSpec(boot_disk_size_gb=200))
    assert (first.replica_count, second.replica_count) == (1, 3)
    assert first.machine_spec == second.machine_spec == topology.machine
    assert first.disk_spec == second.disk_spec == DiskSpec(boot_disk_size_gb=200)
    assert (topology.accelerators_per_node, topology.world_size, topology.network_gbps) == (8, 32, 100)


def test_one_node_is_one_pool() -> None:
    (pool,) = nodes("g2-standard-12", 1).pools(PythonPackageSpec(python_module="trainer"))
    assert pool.replica_count == 1
    assert pool.container_spec is None
    assert pool.python_package_spec == PythonPackageSpec(python_module="trainer")


@pytest.mark.parametrize(
    ("machine", "accelerators"),
    [
        (
            MachineSpec(
                machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=2
            ),
            2,
        ),
        (MachineSpec(machine_type="cloud-tpu", accelerator_type="TPU_V3", accelerator_count=32), 32),
        (MachineSpec(machine_type="ct6e-standard-4t", tpu_topology="4x4"), 16),
        (
            MachineSpec(
                machine_type="a3-highgpu-1g",
                accelerator_type="NVIDIA_H100_80GB",
                accelerator_count=1,
                gpu_partition_size="1g.10gb",
            ),
            1,
        ),
        ("n1-standard-8", 0),
        ("n2-standard-8", 0),
    ],
)
def test_accelerators_of_a_node(machine: MachineSpec | str, accelerators: int) -> None:
    topology = nodes(machine, 1)
    assert topology.accelerators_per_node == accelerators
    assert topology.world_size == max(1, accelerators)


@pytest.mark.parametrize(
    ("machine", "count", "message"),
    [
        ("a2-highgpu-9g", 1, "Did you mean a2-highgpu-"),
        (
            MachineSpec(
                machine_type="n1-highmem-16", accelerator_type="NVIDIA_TESLA_A100", accelerator_count=8
            ),
            1,
            "For NVIDIA_TESLA_A100 use a2-highgpu-8g",
        ),
        (
            MachineSpec(machine_type="a2-highgpu-8g"),
            4,
            "Set accelerator_type NVIDIA_TESLA_A100 and accelerator_count 8",
        ),
        (
            MachineSpec(machine_type="n2-standard-8", accelerator_type="NVIDIA_L4", accelerator_count=1),
            1,
            "no accel",
        ),
        (MachineSpec(machine_type="ct6e-standard-4t", tpu_topology="4x4"), 2, "asked for 2 times"),
        ("ct6e-standard-4t", 1, "It takes 2x2, 2x4"),
    ],
)
def test_machines_that_do_not_exist_are_refused(machine: MachineSpec | str, count: int, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        nodes(machine, count)


def test_no_node_is_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes 0"):
        nodes("a2-highgpu-8g", 0)


def test_bandwidth_is_told_where_a_source_gives_it() -> None:
    def v100(machine_type: str, count: int) -> MachineSpec:
        return MachineSpec(
            machine_type=machine_type, accelerator_type="NVIDIA_TESLA_V100", accelerator_count=count
        )

    assert network_gbps(v100("n1-highmem-96", 8)) == 100
    assert network_gbps(v100("n1-standard-16", 4)) == 32
    assert network_gbps(v100("n1-standard-8", 1)) is None
    assert network_gbps(MachineSpec(machine_type="n1-highcpu-16")) == 32
    assert network_gbps(MachineSpec(machine_type="?")) is None


def test_only_the_rdma_families_have_a_script_to_source() -> None:
    machines = {row.machine_type for row in gpu_machines() if not row.machine_type.startswith("n1-")}
    wrapped = {name for name in machines if nodes(name, 2).command(["train"]) != ("train",)}
    assert wrapped == {"a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g"}
    assert all(not nodes(name, 2).environment for name in machines)
    assert nodes("a4-highgpu-8g", 1).command(["train"]) == ("train",)


def test_a_sourced_command_runs_its_words_as_they_are() -> None:
    words = ["printf", "%s|", "a b", "$HOME", "'q\"", "*", ""]
    shell, option, script, *rest = nodes("a4-highgpu-8g", 2).command(words)
    assert (shell, option, script) == ("bash", "-c", f'source {GIB} && exec "$0" "$@"')
    here = script.replace(GIB, "/dev/null")  # the script is in Google's images only
    done = subprocess.run([shell, option, here, *rest], capture_output=True, text=True, check=True)
    assert done.stdout == "a b|$HOME|'q\"|*||"


def test_a_container_without_a_command_cannot_be_prepared_for_rdma() -> None:
    assert nodes("a3-megagpu-8g", 2).prepared(ContainerSpec(image_uri="i")) == ContainerSpec(image_uri="i")
    assert nodes("a4-highgpu-8g", 2).prepared(PROGRAM).command[-3:] == PROGRAM.command
    with pytest.raises(ValueError, match="Give the image's entry point as command"):
        nodes("a4-highgpu-8g", 2).prepared(ContainerSpec(image_uri="i"))


def settings(machine_type: str, **env: str) -> list[Finding]:
    variables = [EnvVar(name=name, value=value) for name, value in env.items()]
    return list(settings_that_do_not_apply(machine_type, variables, path="env"))


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_IB_HCA": "mlx5_0"},
        {"NCCL_IB_DISABLE": "0"},
        {"NCCL_PLUGIN_P2P": "ib"},
        {"NCCL_NET_GDR_LEVEL": "5"},
        {"NCCL_NET": "IB"},
        {"FI_PROVIDER": "efa"},
    ],
)
@pytest.mark.parametrize(
    "machine_type", ["a2-highgpu-8g", "a3-megagpu-8g", "a3-highgpu-8g", "g2-standard-48", "n1-standard-16"]
)
def test_settings_for_infiniband_are_errors_where_there_is_none(
    machine_type: str, env: dict[str, str]
) -> None:
    (finding,) = settings(machine_type, **env)
    assert (finding.severity, finding.path) == ("error", "env[0]")
    assert finding.fix.startswith("Remove it")


@pytest.mark.parametrize(
    ("machine_type", "env", "told"),
    [
        ("a4-highgpu-8g", {"NCCL_IB_HCA": "mlx5"}, GIB),
        ("a3-megagpu-8g", {"NCCL_FASTRAK_NUM_FLOWS": "2"}, "Vertex AI has configured"),
        ("a2-highgpu-8g", {"NCCL_CROSS_NIC": "1"}, "several network cards"),
        ("a2-highgpu-8g", {"NCCL_SOCKET_IFNAME": "eth0"}, "does not document"),
        ("a2-highgpu-8g", {"WORLD_SIZE": "32"}, "one process per GPU"),
        ("a2-highgpu-8g", {"MASTER_PORT": "29500"}, "one process per GPU"),
    ],
)
def test_settings_that_need_not_be_made_are_warnings(
    machine_type: str, env: dict[str, str], told: str
) -> None:
    (finding,) = settings(machine_type, **env)
    assert finding.severity == "warning"
    assert told in finding.reason


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("RANK", "CLUSTER_SPEC"),
        ("LOCAL_RANK", "CLUSTER_SPEC"),
        ("MASTER_ADDR", "CLUSTER_SPEC"),
        ("AIP_MODEL_DIR", "base_output_directory"),
        ("AIP_TENSORBOARD_RESOURCE_NAME", "tensorboard"),
        ("CLUSTER_SPEC", "Remove it"),
        ("TF_CONFIG", "Remove it"),
        ("CLOUD_ML_JOB_ID", "Remove it"),
    ],
)
def test_what_the_service_or_the_launcher_sets_is_an_error_by_hand(name: str, told: str) -> None:
    (finding,) = settings("a2-highgpu-8g", **{name: "x"})
    assert finding.severity == "error"
    assert told in finding.fix


def test_settings_that_do_apply_are_left_alone() -> None:
    harmless = {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "^lo",
        "OMP_NUM_THREADS": "8",
    }
    assert settings("a2-highgpu-8g", **harmless) == []
    assert settings("a5-new", NCCL_IB_HCA="mlx5") == []
    alone = [EnvVar(name="RANK", value="0"), EnvVar(name="MASTER_ADDR", value="localhost")]
    assert list(settings_that_do_not_apply("g2-standard-12", alone, path="env", is_distributed=False)) == []
