"""The environment of a replica, in the form that the documentation and dumps of real jobs show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJobSpec

from penstock_local.jobs.addresses import AddressBlock
from penstock_local.jobs.replicas import replica_environment, replicas_of


def spec(*counts: int, base: str = "") -> CustomJobSpec:
    pools = [
        {
            "replica_count": count,
            "container_spec": {
                "image_uri": f"image{number}",
                "command": ["run"],
                "args": [f"--pool={number}"],
                "env": [{"name": "A", "value": str(number)}],
            },
        }
        for number, count in enumerate(counts)
    ]
    return CustomJobSpec(worker_pool_specs=pools, base_output_directory={"output_uri_prefix": base})


def environments(job: CustomJobSpec) -> dict[str, dict[str, str]]:
    replicas = replicas_of(job)
    block = AddressBlock(tuple(f"127.1.2.{index + 1}:2222" for index in range(len(replicas))), 3333)
    return {
        replica.name: replica_environment(replica, replicas, block, spec=job, job_id="77", project_number=42)
        for replica in replicas
    }


def test_replicas_are_named_and_ordered_pool_by_pool() -> None:
    replicas = replicas_of(spec(1, 2, 0, 1))
    assert [replica.name for replica in replicas] == [
        "workerpool0-0",
        "workerpool1-0",
        "workerpool1-1",
        "workerpool3-0",
    ]
    assert [replica.is_primary for replica in replicas] == [True, False, False, False]
    assert replicas[1].image == "image1"
    assert replicas[1].command == ("run",)
    assert replicas[1].args == ("--pool=1",)
    assert replicas[1].env == (("A", "1"),)


def test_cluster_spec_has_the_shape_of_real_dumps() -> None:
    told = json.loads(environments(spec(1, 2, 1))["workerpool1-1"]["CLUSTER_SPEC"])
    assert told == {
        "cluster": {
            "workerpool0": ["127.1.2.1:2222"],
            "workerpool1": ["127.1.2.2:2222", "127.1.2.3:2222"],
            "workerpool2": ["127.1.2.4:2222"],
        },
        "environment": "cloud",
        "task": {"type": "workerpool1", "index": 1},
        "job": '{"python_module": "", "package_uris": [], "job_args": ["--pool=1"]}',
        "open_ports": [3333],
    }


def test_a_python_package_is_told_by_its_module_and_uris() -> None:
    task = {
        "executor_image_uri": "image", "package_uris": ["gs://b/a.tar.gz"], "python_module": "train",
        "args": ["--lr=1"], "env": [{"name": "A", "value": "1"}],
    }  # fmt: skip
    job = CustomJobSpec(worker_pool_specs=[{"replica_count": 1, "python_package_spec": task}])
    [replica] = replicas_of(job)
    assert (replica.image, replica.command, replica.args) == ("image", (), ("--lr=1",))
    assert (replica.python_module, replica.package_uris) == ("train", ("gs://b/a.tar.gz",))
    assert replica.env == (("A", "1"),)
    told = json.loads(environments(job)["workerpool0-0"]["CLUSTER_SPEC"])["job"]
    assert told == '{"python_module": "train", "package_uris": ["gs://b/a.tar.gz"], "job_args": ["--lr=1"]}'


def test_empty_pools_are_absent_from_the_cluster() -> None:
    told = json.loads(environments(spec(1, 0, 1))["workerpool2-0"]["CLUSTER_SPEC"])
    assert list(told["cluster"]) == ["workerpool0", "workerpool2"]


@pytest.mark.parametrize(
    ("counts", "nodes"),
    [
        ((1,), {"workerpool0-0": ("0", "1")}),
        ((1, 2), {"workerpool0-0": ("0", "3"), "workerpool1-0": ("1", "3"), "workerpool1-1": ("2", "3")}),
        # Reducers take no part in the ranks.
        (
            (1, 1, 2),
            {"workerpool0-0": ("0", "2"), "workerpool1-0": ("1", "2"), "workerpool2-1": (None, None)},
        ),
    ],
)
def test_rank_and_world_size_count_nodes_without_reducers(
    counts: tuple[int, ...], nodes: dict[str, Any]
) -> None:
    told = environments(spec(*counts))
    assert {name: (told[name].get("RANK"), told[name].get("WORLD_SIZE")) for name in nodes} == nodes
    masters = {(environment["MASTER_ADDR"], environment["MASTER_PORT"]) for environment in told.values()}
    assert masters == {("127.1.2.1", "3333")}
    assert not any("GLOO_SOCKET_IFNAME" in environment for environment in told.values()), (
        "the service sets none"
    )
    assert not any("LOCAL_RANK" in environment for environment in told.values())


def test_tf_config_is_for_distributed_jobs_only_and_knows_no_evaluator() -> None:
    assert "TF_CONFIG" not in environments(spec(1))["workerpool0-0"]
    told = environments(spec(1, 1, 1, 1))
    cluster = {"chief": ["127.1.2.1:2222"], "worker": ["127.1.2.2:2222"], "ps": ["127.1.2.3:2222"]}
    roles = {
        "workerpool0-0": "chief", "workerpool1-0": "worker", "workerpool2-0": "ps", "workerpool3-0": "evaluator",
    }  # fmt: skip
    for name, role in roles.items():
        told_role = json.loads(told[name]["TF_CONFIG"])
        assert told_role["cluster"] == cluster
        assert told_role["job"]["workerPoolSpecs"][3]["containerSpec"]["imageUri"] == "image3"
        assert told_role["task"] == {"type": role, "index": 0}


def test_ids_and_output_directories_are_those_of_the_job() -> None:
    told = environments(spec(1, base="gs://bucket/run/"))["workerpool0-0"]
    assert told["CLOUD_ML_PROJECT_ID"] == "42"
    assert told["CLOUD_ML_JOB_ID"] == "77"
    assert told["AIP_MODEL_DIR"] == "gs://bucket/run/model/"
    assert told["AIP_CHECKPOINT_DIR"] == "gs://bucket/run/checkpoints/"
    assert told["AIP_TENSORBOARD_LOG_DIR"] == "gs://bucket/run/logs/"
    assert not any(name.startswith("AIP_") for name in environments(spec(1))["workerpool0-0"])
