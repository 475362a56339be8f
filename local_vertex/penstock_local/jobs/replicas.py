"""The replicas of a job, and the environment that Vertex gives each of them.

Documented: CLUSTER_SPEC, TF_CONFIG (distributed jobs), CLOUD_ML_PROJECT_ID, CLOUD_ML_JOB_ID, AIP_*_DIR. Seen in
Google's samples, and given here too because a trainer has to cope with them: RANK and WORLD_SIZE that count nodes, and
MASTER_ADDR and MASTER_PORT of the primary. Our choice, because no source says it: that RANK and WORLD_SIZE leave out the
pools after the second, and that MASTER_PORT is the open port.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJobSpec

from penstock_local.api.messages import to_json
from penstock_local.jobs.addresses import AddressBlock

_TF_ROLES = ("chief", "worker", "ps", "evaluator")
MAX_POOLS = len(_TF_ROLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One container of a job."""

    pool: int
    index: int
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    accelerator_count: int
    package_uris: tuple[str, ...] = ()
    python_module: str = ""
    """Of those packages, run in place of a command; empty for a container."""

    @property
    def name(self) -> str:
        """As Vertex names it in logs, such as `workerpool1-0`."""
        return f"workerpool{self.pool}-{self.index}"

    @property
    def is_primary(self) -> bool:
        """Whether its end is the job's end."""
        return self.pool == 0


def replicas_of(spec: CustomJobSpec) -> tuple[Replica, ...]:
    """All replicas, pool by pool."""
    return tuple(_replicas(spec))


def replica_environment(
    replica: Replica,
    replicas: Sequence[Replica],
    addresses: AddressBlock,
    *,
    spec: CustomJobSpec,
    job_id: str,
    project_number: int,
) -> dict[str, str]:
    """The variables that the service sets in one replica."""
    cluster = _cluster(replicas, addresses)
    environment = {
        "CLUSTER_SPEC": json.dumps(_cluster_spec(replica, cluster, addresses)),
        "CLOUD_ML_PROJECT_ID": str(project_number),
        "CLOUD_ML_JOB_ID": job_id,
        **_directories(spec.base_output_directory.output_uri_prefix),
        **_node_level_variables(replica, cluster, addresses.open_port),
    }
    if len(replicas) > 1:
        environment["TF_CONFIG"] = json.dumps(_tf_config(replica, cluster, spec))
    return environment


def _replicas(spec: CustomJobSpec) -> Iterator[Replica]:
    for pool, pool_spec in enumerate(spec.worker_pool_specs):
        container, package = pool_spec.container_spec, pool_spec.python_package_spec
        task = package or container
        for index in range(pool_spec.replica_count):
            yield Replica(
                pool=pool,
                index=index,
                image=container.image_uri or package.executor_image_uri,
                command=tuple(container.command),
                args=tuple(task.args),
                env=tuple((variable.name, variable.value) for variable in task.env),
                accelerator_count=pool_spec.machine_spec.accelerator_count,
                package_uris=tuple(package.package_uris),
                python_module=package.python_module,
            )


def _cluster(replicas: Sequence[Replica], addresses: AddressBlock) -> dict[str, list[str]]:
    cluster: dict[str, list[str]] = {}
    for replica, endpoint in zip(replicas, addresses.endpoints, strict=True):
        cluster.setdefault(f"workerpool{replica.pool}", []).append(endpoint)
    return cluster


def _cluster_spec(replica: Replica, cluster: dict[str, list[str]], addresses: AddressBlock) -> dict[str, Any]:
    module, uris = replica.python_module, replica.package_uris
    job = {"python_module": module, "package_uris": uris, "job_args": replica.args}
    return {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"type": f"workerpool{replica.pool}", "index": replica.index},
        # A JSON string in the dumps of real jobs, although the documentation describes an object.
        "job": json.dumps(job),
        "open_ports": [addresses.open_port],
    }


def _tf_config(replica: Replica, cluster: dict[str, list[str]], spec: CustomJobSpec) -> dict[str, Any]:
    roles = {_TF_ROLES[int(pool.removeprefix("workerpool"))]: hosts for pool, hosts in cluster.items()}
    roles.pop("evaluator", None)  # an evaluator is never part of the cluster that trains
    return {
        "cluster": roles,
        "environment": "cloud",
        "job": to_json(spec),
        "task": {"type": _TF_ROLES[replica.pool], "index": replica.index},
    }


def _directories(base: str) -> dict[str, str]:
    if not base:
        return {}
    root = base.rstrip("/")
    return {
        "AIP_MODEL_DIR": f"{root}/model/",
        "AIP_CHECKPOINT_DIR": f"{root}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{root}/logs/",
    }


def _node_level_variables(replica: Replica, cluster: dict[str, list[str]], port: int) -> dict[str, str]:
    """What PyTorch containers find on Vertex: node counts under names that torch uses for processes."""
    master = {"MASTER_ADDR": cluster["workerpool0"][0].rpartition(":")[0], "MASTER_PORT": str(port)}
    workers = len(cluster.get("workerpool1", ()))
    if replica.pool > 1:
        return master
    rank = 0 if replica.pool == 0 else replica.index + 1
    return {**master, "RANK": str(rank), "WORLD_SIZE": str(1 + workers)}
