"""The nodes of a job as CLUSTER_SPEC describes them: worker pools 0 and 1, and nothing else.

Vertex's own RANK and WORLD_SIZE count nodes, and it is not documented whether they count reduction servers; they are
not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

_PRIMARY_POOL, _WORKER_POOL = "workerpool0", "workerpool1"


class ClusterError(ValueError):
    """CLUSTER_SPEC is not of the documented form, or this process is in a pool where no trainer runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The job's nodes, seen from one of them."""

    num_nodes: int
    """Replicas of pools 0 and 1."""
    node_rank: int
    """0 for the primary; i + 1 for replica i of pool 1."""
    primary_host: str
    primary_port: int
    """Where the launchers and ranks meet. 0 without CLUSTER_SPEC: any free port will do."""
    open_ports: tuple[int, ...]
    """Other ports that are open between the nodes. Vertex gives [3333], which is not documented; hence () when it is
    absent or not a list of ports."""
    pool: str
    """`workerpool0` or `workerpool1`."""

    @property
    def is_primary(self) -> bool:
        """Whether the exit of this node's container decides the job."""
        return self.node_rank == 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """The cluster of CLUSTER_SPEC, or this machine alone when there is none. Raises ClusterError."""
        if "CLUSTER_SPEC" not in environ:
            return cls(
                num_nodes=1,
                node_rank=0,
                primary_host="127.0.0.1",
                primary_port=0,
                open_ports=(),
                pool=_PRIMARY_POOL,
            )
        spec = _object(_parse(environ["CLUSTER_SPEC"]), "CLUSTER_SPEC")
        pools = _object(spec.get("cluster"), "CLUSTER_SPEC.cluster")
        task = _object(spec.get("task"), "CLUSTER_SPEC.task")
        primary = _replicas(pools, _PRIMARY_POOL)
        workers = _replicas(pools, _WORKER_POOL)
        if len(primary) != 1:
            raise ClusterError(f"CLUSTER_SPEC.cluster.workerpool0 is {primary!r}: it must name one replica.")
        host, port = _address(primary[0])
        pool = str(task.get("type"))
        return cls(
            num_nodes=1 + len(workers),
            node_rank=_node_rank(pool, task.get("index"), len(workers)),
            primary_host=host,
            primary_port=port,
            open_ports=_open_ports(spec),
            pool=pool,
        )


def _node_rank(pool: str, index: object, num_workers: int) -> int:
    if pool in ("workerpool2", "workerpool3"):
        raise ClusterError(
            f"this replica is in {pool}, where no trainer runs: ranks are in workerpool0 and workerpool1 only. "
            "Give that pool an image of its own (workerpool2: a reduction server)."
        )
    sizes = {_PRIMARY_POOL: 1, _WORKER_POOL: num_workers}
    if pool not in sizes:
        raise ClusterError(
            f"CLUSTER_SPEC.task.type is {pool!r}: it must be one of workerpool0 to workerpool3."
        )
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < sizes[pool]:
        raise ClusterError(
            f"CLUSTER_SPEC.task.index is {index!r}: {pool} has {sizes[pool]} replica(s), counted from 0."
        )
    return index if pool == _PRIMARY_POOL else index + 1


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise ClusterError(
            f"CLUSTER_SPEC is not JSON ({exc}): {text!r}. Unset it to run on this machine alone."
        ) from exc


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(f"{path} is {value!r}: it must be a JSON object.")
    return value


def _replicas(pools: dict[str, Any], name: str) -> list[str]:
    replicas = pools.get(name, [])
    if not isinstance(replicas, list) or not all(isinstance(replica, str) for replica in replicas):
        raise ClusterError(f'CLUSTER_SPEC.cluster.{name} is {replicas!r}: it must be a list of "host:port".')
    return replicas


def _address(replica: str) -> tuple[str, int]:
    host, _, port = replica.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(f'CLUSTER_SPEC.cluster.workerpool0[0] is {replica!r}: it must be "host:port".')
    return host, int(port)


def _open_ports(spec: dict[str, Any]) -> tuple[int, ...]:
    ports = spec.get("open_ports", [])
    if not isinstance(ports, list) or not all(type(port) is int and 0 < port < 65536 for port in ports):
        return ()
    return tuple(ports)
