"""Nodes against reducers: whose bandwidth is the larger, and what that makes of an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_components.jobs.all_reduce import all_reduce_gain, reducers_needed, ring_gain
from penstock_components.jobs.messages import WorkerPoolSpec
from penstock_components.jobs.roles import SERVERS
from penstock_components.jobs.topology import network_gbps

POOL_INDEX = SERVERS
"""Of the reducers' pool. Pools 0 and 1 are the nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """Nodes and reducers of a job, as their pools say."""

    num_nodes: int
    node_types: str
    num_reducers: int
    reducer_type: str
    nodes_gbps: float | None
    """Egress of all nodes together; None where that of one is not known."""
    reducer_gbps: float | None
    """Egress of one reducer."""

    @property
    def reducers_needed(self) -> int | None:
        """Reducers whose bandwidth reaches that of all nodes; None where a bandwidth is not known."""
        if self.nodes_gbps is None or not self.reducer_gbps:
            return None
        return reducers_needed(nodes_gbps=self.nodes_gbps, reducer_gbps=self.reducer_gbps)

    @property
    def gain(self) -> float | None:
        """Speed of an all-reduce over the reducers, as a multiple of a ring's; None where a bandwidth is not known."""
        if not self.nodes_gbps or self.reducer_gbps is None:
            return None
        return all_reduce_gain(
            num_nodes=self.num_nodes,
            nodes_gbps=self.nodes_gbps,
            reducers_gbps=self.num_reducers * self.reducer_gbps,
        )

    @property
    def told(self) -> str:
        """What the pool brings, in a sentence."""
        gain, most = self.gain, ring_gain(self.num_nodes)
        is_bottleneck = gain is not None and gain < 1
        if self.num_nodes <= 2:
            slower = f", and these reducers are slower still, {gain:.2f}x" if is_bottleneck else ""
            return (
                f"at {self.num_nodes} nodes a Reduction Server brings nothing: a ring moves each byte 2(n-1)/n = "
                f"{most:.2f} times{slower}"
            )
        if is_bottleneck:
            return (
                f"{self.num_reducers} reducers are a bottleneck for {self.num_nodes} x {self.node_types}: the all-reduce "
                f"is {gain:.2f}x as fast as a ring; {self.reducers_needed} x {self.reducer_type} reach the nodes' bandwidth"
            )
        unknown = " if their bandwidth suffices, which the catalogue does not know" if gain is None else ""
        return f"on {self.num_nodes} nodes up to {most if gain is None else gain:.2f}x on the all-reduce{unknown}"


def sizing(pools: Sequence[WorkerPoolSpec]) -> Sizing | None:
    """That of a job with reducers at index 2 behind at least one node; None for any other."""
    reducers = pools[POOL_INDEX] if len(pools) > POOL_INDEX else WorkerPoolSpec()
    nodes = [
        (pool.machine_spec, pool.replica_count)
        for pool in pools[:POOL_INDEX]
        if pool.machine_spec is not None and pool.replica_count > 0
    ]
    if reducers.machine_spec is None or not nodes:
        return None
    each = [(count, network_gbps(machine)) for machine, count in nodes]
    known = [count * gbps for count, gbps in each if gbps is not None]
    return Sizing(
        num_nodes=sum(count for count, _ in each),
        node_types=" and ".join(dict.fromkeys(machine.machine_type for machine, _ in nodes)),
        num_reducers=reducers.replica_count,
        reducer_type=reducers.machine_spec.machine_type,
        nodes_gbps=sum(known) if len(known) == len(each) else None,
        reducer_gbps=network_gbps(reducers.machine_spec),
    )
