"""What an all-reduce over reducers gains against a ring, for one engine and in money.

n nodes of bandwidth Bw, r reducers of bandwidth Br, M bytes for each node. A ring moves every byte 2(n-1)/n times through
a node, reducers move it once each way: ring 2(n-1)/n * M/Bw; reducers max(M/Bw, n*M/(r*Br)). Derived from Google's
description of Reduction Server; nothing here is a measurement, and latency is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficShare:
    """Which part of the bytes that an engine sends between nodes is all-reduce, the one thing that reducers do."""

    share: float
    """0 to 1."""
    is_documented: bool
    """Whether Google documents that reducers serve such traffic."""
    reason: str


_SHARES = {
    "ddp": TrafficShare(share=1.0, is_documented=True, reason="all of its traffic is an all-reduce of gradients"),
    # DeepSpeed's defaults (use_multi_rank_bucket_allreduce): counted, 1 all_reduce and 1 all_gather of the parameters'
    # elements in each step, and an all-reduce moves each byte twice.
    **dict.fromkeys(
        ("zero1", "zero2"),
        TrafficShare(
            share=2 / 3,
            is_documented=True,
            reason="two thirds of its traffic, with DeepSpeed's defaults, are an all-reduce of gradients; the rest gathers "
            "parameters",
        ),
    ),
    **dict.fromkeys(
        ("zero3", "fsdp-full"),
        TrafficShare(
            share=0.0,
            is_documented=True,
            reason="it reduce-scatters gradients and gathers parameters, and never all-reduces",
        ),
    ),
    # With one shard group to a node, which is the engine's default.
    "fsdp-hybrid": TrafficShare(
        share=1.0,
        is_documented=False,
        reason="its copies all-reduce their gradients between nodes; a gain there is possible, not documented",
    ),
}  # fmt: skip


def traffic_share(strategy: str) -> TrafficShare | None:
    """That of `engine.strategy`; None for a program that is not known."""
    return _SHARES.get(strategy)


def ring_gain(num_nodes: int) -> float:
    """How much faster than a ring an all-reduce over enough reducers is: 2(n-1)/n for n nodes; 1 at 2 nodes."""
    return 2 * (num_nodes - 1) / num_nodes


def all_reduce_gain(*, num_nodes: int, nodes_gbps: float, reducers_gbps: float) -> float:
    """The same over these reducers, from the total bandwidths of both: 2(n-1)/n * min(1, r*Br / (n*Bw)).

    Below 1 the reducers are a bottleneck, and a ring is faster.
    """
    return ring_gain(num_nodes) * min(1.0, reducers_gbps / nodes_gbps)


def reducers_needed(*, nodes_gbps: float, reducer_gbps: float) -> int:
    """Reducers whose bandwidth reaches that of all nodes (Vertex AI documentation, training/distributed-training)."""
    return math.ceil(nodes_gbps / reducer_gbps)


def communication_gain(share: float, gain: float) -> float:
    """What `gain` on a share of the bytes makes of all communication: 1 / (1 - share + share / gain)."""
    return 1 / (1 - share + share / gain)


def step_gain(*, compute_seconds: float, exposed_seconds: float, gain: float) -> float:
    """How much faster a step becomes: (C + A) / (C + A/gain).

    A is the communication that computation does not hide. Where it hides everything, nothing is gained.
    """
    return (compute_seconds + exposed_seconds) / (compute_seconds + exposed_seconds / gain)


def break_even_step_gain(
    *, num_nodes: int, num_reducers: int, node_price: float, reducer_price: float
) -> float:
    """The step gain from which reducers pay for themselves: 1 + r*pr / (n*pw).

    Prices are of one machine for an hour, yours, in one currency. Raises ValueError unless a node has a price.
    """
    if node_price <= 0 or reducer_price < 0:
        raise ValueError(
            f"node_price {node_price} must be above 0 and reducer_price {reducer_price} not below."
        )
    return 1 + num_reducers * reducer_price / (num_nodes * node_price)
