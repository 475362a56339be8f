"""Four pools through Google's client: what each role finds in TF_CONFIG and CLUSTER_SPEC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.vertex.stand_in import IMAGE, Rest, StandIn
from penstock_components.jobs.messages import ContainerSpec, CustomJobSpec, MachineSpec, WorkerPoolSpec
from penstock_components.jobs.roles import Evaluators, ParameterServers, later_pools
from penstock_components.jobs.wire import to_api

# Each replica says what it was told; the primary ends when all have, and with it the job.
SAY = """
import json, os, pathlib, sys, time
told = {name: json.loads(os.environ.get(name, "null")) for name in ("TF_CONFIG", "CLUSTER_SPEC")}
print("SAID", json.dumps({**told, "RANK": os.environ.get("RANK")}), flush=True)
meet, replicas = pathlib.Path(sys.argv[1]), int(sys.argv[2])
task = told["CLUSTER_SPEC"]["task"]
(meet / f"{task['type']}-{task['index']}").touch()
while len(list(meet.iterdir())) < replicas or task["type"] != "workerpool0":
    time.sleep(0.05)
"""
SUBMIT = """
import json
from google.cloud.aiplatform_v1 import JobServiceClient
client = JobServiceClient(client_options={{"api_endpoint": "us-central1-aiplatform.googleapis.com"}})
job = {{"display_name": "roles", "job_spec": json.loads({spec!r})}}
result = client.create_custom_job(parent="projects/demo/locations/us-central1", custom_job=job).name
"""
MACHINE = MachineSpec(machine_type="n1-standard-4")
NAMES = [
    "workerpool0-0", "workerpool1-0", "workerpool1-1", "workerpool2-0", "workerpool2-1", "workerpool3-0",
]  # fmt: skip


def run(vertex: StandIn, rest: Rest, spec: CustomJobSpec) -> str:
    name: str = vertex.client(SUBMIT.format(spec=json.dumps(to_api(spec))))
    rest.wait_until(name, "SUCCEEDED", seconds=60)
    return name


def said(rest: Rest, name: str, replica: str) -> Any:
    """What a replica printed. As text: a line that is JSON would come back with floats for its integers."""
    return json.loads(rest.lines(name, replica)[0].removeprefix("SAID "))


@pytest.fixture(scope="module")
def told(vertex: StandIn, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By replica, what it said in a job of 1 + 2 + 2 + 1 replicas."""
    container = _container(tmp_path_factory.mktemp("meet"), len(NAMES))
    servers = ParameterServers(machine=MACHINE, replica_count=2, container=container)
    pools = (
        WorkerPoolSpec(machine_spec=MACHINE, replica_count=1, container_spec=container),
        WorkerPoolSpec(machine_spec=MACHINE, replica_count=2, container_spec=container),
        *later_pools(parameter_servers=servers, evaluators=Evaluators(machine=MACHINE, container=container)),
    )
    name = run(vertex, rest, CustomJobSpec(worker_pool_specs=pools))
    return {replica: said(rest, name, replica) for replica in NAMES}


def test_tf_config_names_chief_workers_and_parameter_servers(told: dict[str, dict[str, Any]]) -> None:
    configs = {replica: each["TF_CONFIG"] for replica, each in told.items()}
    [cluster] = {json.dumps(config["cluster"], sort_keys=True) for config in configs.values()}
    assert {role: len(hosts) for role, hosts in json.loads(cluster).items()} == {
        "chief": 1, "worker": 2, "ps": 2,
    }  # fmt: skip
    assert [configs[replica]["task"] for replica in NAMES] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "ps", "index": 0},
        {"type": "ps", "index": 1},
        {"type": "evaluator", "index": 0},  # a task, though no part of the cluster
    ]
    assert {config["environment"] for config in configs.values()} == {"cloud"}
    assert len(configs["workerpool0-0"]["job"]["workerPoolSpecs"]) == 4


def test_cluster_spec_names_all_four_pools(told: dict[str, dict[str, Any]]) -> None:
    specs = [told[replica]["CLUSTER_SPEC"] for replica in NAMES]
    assert {pool: len(hosts) for pool, hosts in specs[0]["cluster"].items()} == {
        "workerpool0": 1, "workerpool1": 2, "workerpool2": 2, "workerpool3": 1,
    }  # fmt: skip
    addresses = [host for hosts in specs[0]["cluster"].values() for host in hosts]
    assert len(set(addresses)) == len(NAMES)
    assert [f"{spec['task']['type']}-{spec['task']['index']}" for spec in specs] == NAMES
    by_role = told["workerpool0-0"]["TF_CONFIG"]["cluster"]
    assert by_role["ps"] == specs[0]["cluster"]["workerpool2"]  # both tell the same addresses


def test_ranks_are_the_primary_and_the_workers(told: dict[str, dict[str, Any]]) -> None:
    assert [told[replica]["RANK"] for replica in NAMES] == ["0", "1", "2", None, None, None]


def test_a_job_of_one_replica_has_no_tf_config(vertex: StandIn, rest: Rest, tmp_path: Path) -> None:
    pool = WorkerPoolSpec(machine_spec=MACHINE, replica_count=1, container_spec=_container(tmp_path, 1))
    name = run(vertex, rest, CustomJobSpec(worker_pool_specs=(pool,)))
    assert said(rest, name, "workerpool0-0")["TF_CONFIG"] is None


def _container(meet: Path, replicas: int) -> ContainerSpec:
    return ContainerSpec(image_uri=IMAGE, command=("python", "-c", SAY), args=(str(meet), str(replicas)))
