"""Traffic: what follows from the groups and the nodes, which gloo ranks on one machine cannot show."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_components.planning.shape import decoder_shape
from penstock_components.planning.traffic import (
    Collective,
    helped_by_reduction_server,
    sent_bytes,
    step_traffic,
)
from penstock_trainer.contract.config import EngineConfig, JobConfig, ModelConfig
from penstock_trainer.contract.fields import ContractError

MODEL = ModelConfig(dim=512, num_layers=4, num_heads=8, num_kv_heads=8, ffn_dim=1408)
SHAPE = decoder_shape(MODEL, 4096)


def traffic(strategy: str, *, ranks: int = 32, per_node: int = 8, **engine: Any) -> tuple[Collective, ...]:
    config = JobConfig(
        model=MODEL,
        engine=EngineConfig(strategy=strategy, precision="bf16", **engine),  # type: ignore[arg-type]
        global_batch=32,
    )
    return step_traffic(config, SHAPE, world_size=ranks, ranks_per_node=per_node)


def sent(strategy: str, **more: Any) -> float:
    return sum(sent_bytes(one) for one in traffic(strategy, **more)) / SHAPE.num_parameters


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter"),
    [
        ("ddp", 2 * 4),  # fp32 gradients, all-reduced
        ("zero1", 2 * 4 + 2),  # and bf16 parameters gathered
        ("zero2", 2 * 4 + 2),
        ("fsdp-full", 4 + 2 * 2),  # scattered, and gathered twice but for the root
        ("zero3", 4 + 2),  # gathered once: smaller than what the coordinator keeps
    ],
)
def test_what_a_rank_sends_over_a_ring(strategy: str, bytes_per_parameter: float) -> None:
    # Stage 3 gathers small parameters after the step; the root of FSDP is gathered once.
    assert sent(strategy) == pytest.approx(bytes_per_parameter * 31 / 32, rel=0.12)


def test_a_reduction_server_helps_the_all_reduce_between_nodes_alone() -> None:
    helped = {
        strategy: {(one.operation, one.group) for one in traffic(strategy) if helped_by_reduction_server(one)}
        for strategy in ("ddp", "zero2", "zero3", "fsdp-full", "fsdp-hybrid")
    }
    assert helped == {
        "ddp": {("all_reduce", "world")},
        "zero2": {("all_reduce", "world")},
        "zero3": set(),
        "fsdp-full": set(),
        "fsdp-hybrid": {("all_reduce", "replicate")},
    }
    assert not any(map(helped_by_reduction_server, traffic("ddp", ranks=8)))


def test_hybrid_shards_within_a_node_and_sends_between_nodes_what_a_shard_has() -> None:
    of_group = {one.group: one for one in traffic("fsdp-hybrid") if one.purpose == "gradients"}
    assert (of_group["shard"].group_size, of_group["replicate"].group_size) == (8, 4)
    assert not of_group["shard"].crosses_nodes
    assert of_group["replicate"].crosses_nodes
    assert of_group["replicate"].bytes * 8 == of_group["shard"].bytes


def test_a_shard_group_wider_than_a_node_crosses_nodes() -> None:
    assert all(one.crosses_nodes for one in traffic("fsdp-hybrid", shard_size=16))


def test_a_world_of_one_sends_nothing() -> None:
    for strategy in ("ddp", "fsdp-full", "zero2", "zero3"):
        assert traffic(strategy, ranks=1) == ()


def test_sizes_that_do_not_multiply_to_the_world_are_refused() -> None:
    with pytest.raises(ContractError, match="a divisor of the 32 ranks"):
        traffic("fsdp-hybrid", shard_size=12)


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0)],
)
def test_shares_of_a_ring_of_four(operation: Any, share: float) -> None:
    one = Collective(
        operation=operation,
        purpose="gradients",
        group="world",
        group_size=4,
        crosses_nodes=True,
        calls=1,
        bytes=1000,
    )
    assert sent_bytes(one) == 1000 * share
