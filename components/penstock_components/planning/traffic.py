"""What a step sends: the collectives of one optimizer step, with the bytes of their tensors.

Counted are the collectives of a training step in a steady state: of gradients, of parameters, and the small ones of the
gradient's norm. Not counted are those of the trainer around it, a few bytes a step over gloo (whether to stop, the loss
of a logged step). tests/distributed/test_planner.py compares all with what gloo ranks call.

A ring sends of each rank, for a whole tensor of M bytes over n ranks, 2(n-1)/n M in an all-reduce and (n-1)/n M in an
all-gather or a reduce-scatter (Patarasuk and Yuan, 2009; arXiv:1910.02054, section 7). NCCL may take other algorithms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock_components.planning.placement import (
    FP32,
    Device,
    Placement,
    chunk,
    decay_groups,
    flat_groups,
    gradient_order,
    shard_numel,
)
from penstock_components.planning.shape import ModelShape, Parameter
from penstock_components.planning.states import bucket_numel, keeps_fp32_gradients, num_sub_groups, persistent
from penstock_components.planning.zero3 import gathers
from penstock_trainer.contract.config import JobConfig

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
Group = Literal["world", "shard", "replicate"]
Purpose = Literal["gradients", "parameters", "norm"]

_ALLREDUCE_NUMEL = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of deepspeed/runtime/engine.py, in elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All calls of one kind in one optimizer step, as one rank makes them."""

    operation: Operation
    purpose: Purpose
    group: Group
    """`world`: all ranks; `shard` and `replicate`: FSDP's mesh axes."""
    group_size: int
    """Ranks."""
    crosses_nodes: bool
    """Whether ranks of the group are on different nodes."""
    calls: int
    bytes: int
    """Of the whole tensors, padding included, over all calls: of an all-gather what each rank has in the end, of a
    reduce-scatter what each rank puts in."""


def step_traffic(
    config: JobConfig,
    shape: ModelShape,
    *,
    world_size: int,
    ranks_per_node: int,
    device: Device = "cuda",
) -> tuple[Collective, ...]:
    """The collectives of one optimizer step of every rank; none for a world of one.

    `device` matters where DeepSpeed reduces in another order without a GPU. Raises ContractError for a world that the
    config does not fit.
    """
    at = Placement(
        config=config, shape=shape, world_size=world_size, ranks_per_node=ranks_per_node, device=device
    )
    return tuple(_summed(at, _calls(at)))


def sent_bytes(collective: Collective) -> float:
    """What each rank sends over a ring; see the module's head. Of broadcast and reduce, a rank in the middle of a chain."""
    share = (collective.group_size - 1) / collective.group_size
    if collective.operation == "all_reduce":
        return 2 * share * collective.bytes
    if collective.operation in ("all_gather", "reduce_scatter"):
        return share * collective.bytes
    return float(collective.bytes)


def helped_by_reduction_server(collective: Collective) -> bool:
    """Whether a Reduction Server takes part: it serves NCCL's all-reduce between nodes; the norm's few bytes are left out."""
    return (
        collective.operation == "all_reduce"
        and collective.crosses_nodes
        and collective.purpose == "gradients"
    )


@dataclass(frozen=True, slots=True)
class _Call:
    operation: Operation
    purpose: Purpose
    group: Group
    bytes: int


def _summed(at: Placement, calls: Iterator[_Call]) -> Iterator[Collective]:
    sizes = {"world": at.world_size, "shard": at.shard_size, "replicate": at.world_size // at.shard_size}
    found: dict[tuple[Operation, Purpose, Group], list[int]] = defaultdict(list)
    for call in calls:
        found[call.operation, call.purpose, call.group].append(call.bytes)
    for (operation, purpose, group), payloads in found.items():
        if sizes[group] > 1:
            yield Collective(
                operation=operation,
                purpose=purpose,
                group=group,
                group_size=sizes[group],
                crosses_nodes=_crosses_nodes(at, group),
                calls=len(payloads),
                bytes=sum(payloads),
            )


def _crosses_nodes(at: Placement, group: Group) -> bool:
    """Ranks of a shard group follow one another; those of a replicate group are `shard_size` apart."""
    if group == "shard":
        return any(
            first // at.ranks_per_node != (first + at.shard_size - 1) // at.ranks_per_node
            for first in range(0, at.world_size, at.shard_size)
        )
    return at.world_size > at.ranks_per_node


def _calls(at: Placement) -> Iterator[_Call]:
    if at.engine.strategy == "ddp":
        yield from _ddp(at)
    elif not at.is_zero:
        yield from _fsdp(at)
    elif at.engine.strategy == "zero3":
        yield from _zero_3(at)
    else:
        yield from _zero_1_and_2(at)


def _ddp(at: Placement) -> Iterator[_Call]:
    """An all-reduce of each bucket with the last micro-batch."""
    for bucket in ddp_buckets(at):
        yield _Call("all_reduce", "gradients", "world", at.reduce_bytes * sum(p.numel for p in bucket))


def ddp_buckets(at: Placement) -> Iterator[list[Parameter]]:
    """Gradients in the order in which they are finished; a bucket is full with the one that reaches its size
    (`compute_bucket_assignment_by_size`, torch/csrc/distributed/c10d/reducer.cpp)."""
    bucket: list[Parameter] = []
    for parameter in gradient_order(at.shape):
        bucket.append(parameter)
        if FP32 * sum(p.numel for p in bucket) >= at.engine.bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _fsdp(at: Placement) -> Iterator[_Call]:
    """Blocks are gathered for forward and again for backward, the root once; gradients are reduced once a step.

    One flat tensor for each block (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    if at.is_whole:
        return
    shards, reshards = at.shard_size, at.engine.reshard_after_forward
    for block in [None, *range(at.shape.num_blocks)]:
        members = at.shape.members(block)
        if not members:
            continue
        whole = shards * sum(shard_numel(parameter, shards) for parameter in members)
        times = at.accumulation * (2 if reshards and block is not None else 1)
        yield from [_Call("all_gather", "parameters", "shard", at.item_bytes * whole)] * times
        reduced = shards * sum(shard_numel(p, shards) for p in members if p.is_trained)
        if reduced:
            yield _Call("reduce_scatter", "gradients", "shard", at.reduce_bytes * reduced)
            yield _Call("all_reduce", "gradients", "replicate", at.reduce_bytes * reduced // shards)
    # Each rank's norms of its shards, one for each tensor (DTensor's stacked partial norms).
    yield _Call("all_reduce", "norm", "shard", FP32 * len(at.shape.trained))


def _zero_1_and_2(at: Placement) -> Iterator[_Call]:
    """Gradients are all-reduced although a rank keeps a part of them: in stage 2 those of every micro-batch, in stage 1
    their sum. Then each group's parameters are gathered (deepspeed/runtime/zero/stage_1_and_2.py)."""
    if at.engine.strategy == "zero1" and keeps_fp32_gradients(at):
        yield from _bf16_optimizer(at)
    else:
        times = at.accumulation if at.engine.strategy == "zero2" else 1
        for bucket in zero_buckets(at):
            payload = at.reduce_bytes * sum(parameter.numel for parameter in bucket)
            yield from [_Call("all_reduce", "gradients", "world", payload)] * times
        yield from [_Call("all_reduce", "norm", "world", FP32)] * len(flat_groups(at))
        if at.is_narrow:  # whether any gradient is infinite
            yield _Call("all_reduce", "norm", "world", 1)
    for group in flat_groups(at):
        yield _Call("all_gather", "parameters", "world", at.item_bytes * group.numel)


def zero_buckets(at: Placement) -> Iterator[list[Parameter]]:
    """Gradients as DeepSpeed fills its buckets: as they are finished, or group by group where stage 1 does not overlap
    (`reduce_gradients`). One that does not fit goes into the next; one larger than a bucket is alone."""
    order = gradient_order(at.shape)
    if at.engine.strategy == "zero1" and not at.overlaps:
        order = [parameter for group in decay_groups(at.shape) for parameter in group]
    bucket: list[Parameter] = []
    for parameter in order:
        if bucket and sum(p.numel for p in bucket) + parameter.numel > bucket_numel(at):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _bf16_optimizer(at: Placement) -> Iterator[_Call]:
    """The flattened gradients of the groups, together until they are large (`allreduce_no_retain`,
    deepspeed/runtime/engine.py)."""
    numel = 0
    for group in flat_groups(at):
        numel += group.numel
        if numel > _ALLREDUCE_NUMEL:
            yield _Call("all_reduce", "gradients", "world", at.reduce_bytes * numel)
            numel = 0
    if numel:
        yield _Call("all_reduce", "gradients", "world", at.reduce_bytes * numel)


def _zero_3(at: Placement) -> Iterator[_Call]:
    """Parameters as the coordinator fetches them, gradients scattered by buckets for every micro-batch, and the small
    parameters that stay whole gathered after the step (deepspeed/runtime/zero/stage3.py)."""
    ranks = at.world_size
    for fetched in gathers(at):
        payload = at.item_bytes * ranks * sum(chunk(p.numel, ranks) for p in fetched)
        yield from [_Call("all_gather", "parameters", "world", payload)] * at.accumulation
    for parameter in persistent(at):
        yield _Call(
            "all_gather", "parameters", "world", at.item_bytes * ranks * chunk(parameter.numel, ranks)
        )
    for bucket in zero_buckets(at):
        payload = at.reduce_bytes * ranks * sum(chunk(p.numel, ranks) for p in bucket)
        yield from [_Call("reduce_scatter", "gradients", "world", payload)] * at.accumulation
    width = FP32 if at.engine.cpu_offload else 2 * FP32
    yield from [_Call("all_reduce", "norm", "world", width)] * num_sub_groups(at)
