"""Reduction Server: where its pool stands, how large it must be, and what it brings.

Google's guide: reducers sum gradients of NCCL all-reduce for the workers, so that each worker sends and receives
every byte once, where a ring does it 2(n-1)/n times. The total bandwidth of the reducers has to reach that of the
workers. Both figures below follow from that; neither is a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_components.jobs.pools import Container, JobSpecError, Machine, WorkerPool
from penstock_components.machines.catalogue import reducer_network_gbps

POOL_INDEX = 2
_MULTI_REGIONS = {
    "us": "us", "northamerica": "us", "southamerica": "us", "europe": "europe", "africa": "europe",
    "asia": "asia", "australia": "asia", "me": "asia",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionServer:
    """The reducers of one job."""

    replica_count: int
    machine_type: str = "n1-highcpu-16"
    """Recommended by Google's guide, with 32 Gbit/s of egress."""

    def pool(self, location: str) -> WorkerPool:
        """The pool for index 2; the image of the multi-region nearest to `location`."""
        reducer_network_gbps(self.machine_type)
        machine = Machine(machine_type=self.machine_type)
        return WorkerPool(
            machine=machine,
            replica_count=self.replica_count,
            container=Container(image_uri=image_uri(location)),
        )


def image_uri(location: str) -> str:
    """Google's image of the reducer; it keeps Google's tag. Raises JobSpecError for a location of no known region."""
    multi_region = _MULTI_REGIONS.get(location.partition("-")[0])
    if multi_region is None:
        raise JobSpecError(
            f"location {location!r} belongs to none of the regions {', '.join(sorted(_MULTI_REGIONS))}."
        )
    return f"{multi_region}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"


def ring_gain(num_nodes: int) -> float:
    """How much faster than a ring an all-reduce over enough reducers is: 2(n-1)/n for n nodes."""
    return 2 * (num_nodes - 1) / num_nodes


def reducers_needed(num_nodes: int, node_gbps: float, reducer_gbps: float) -> int:
    """Reducers whose bandwidth reaches that of all nodes; with fewer the reducers are the bottleneck."""
    return math.ceil(num_nodes * node_gbps / reducer_gbps)


def gain(server: ReductionServer, *, machine: Machine, num_nodes: int) -> float | None:
    """Speed of an all-reduce over these reducers, as a multiple of a ring's; None where a bandwidth is not known.

    min(1, m*Br / (n*Bw)) of the ring's 2(n-1)/n for m reducers of Br and n nodes of Bw. Raises MachineError for a
    reducer machine that is not in the catalogue.
    """
    if machine.network_gbps is None:
        return None
    share = (
        server.replica_count * reducer_network_gbps(server.machine_type) / (num_nodes * machine.network_gbps)
    )
    return ring_gain(num_nodes) * min(1.0, share)


def advice(server: ReductionServer, *, machine: Machine, num_nodes: int) -> str:
    """What the pool would bring on Vertex at this size, in a sentence. Raises MachineError as `gain` does."""
    reached = gain(server, machine=machine, num_nodes=num_nodes)
    if reached is not None and reached < 1:
        needed = reducers_needed(
            num_nodes, machine.network_gbps or 0, reducer_network_gbps(server.machine_type)
        )
        return (
            f"{server.replica_count} reducers are a bottleneck for {num_nodes} x {machine.machine_type}: the all-reduce "
            f"is {reached:.2f}x as fast as a ring; {needed} x {server.machine_type} reach the nodes' bandwidth"
        )
    if num_nodes <= 2:
        moved = ring_gain(num_nodes)
        return f"at {num_nodes} nodes a Reduction Server brings nothing: a ring moves each byte 2(n-1)/n = {moved:.2f} times"
    unknown = " if their bandwidth suffices, which the catalogue does not know" if reached is None else ""
    return f"on {num_nodes} nodes up to {reached or ring_gain(num_nodes):.2f}x on the all-reduce{unknown}"
