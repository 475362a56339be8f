"""What a rank writes of the state, and where in its buffer each part goes: planned once, for every save of the run.

The parts, and which rank writes what several hold, are torch.distributed.checkpoint's own plan. It does not change while
the run goes on, because tensors keep their shapes and ranks; so no save needs a collective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
from torch.distributed.checkpoint.planner import WriteItem

from penstock_trainer.checkpoints.layout import Layout, PlannedChunk, PlannedObject, TensorInfo
from penstock_trainer.engines.engine import State
from penstock_trainer.world import World

OBJECT_BYTES = 64 * 2**20
"""Of one object, about. A few are sent at once, and one that fails is sent again whole; below this size requests begin to
cost more than bytes."""
_ALIGNMENT = 64
"""Of a part in the buffer: a cache line, and a multiple of every element's size."""


@dataclass(frozen=True, slots=True)
class Part:
    """One box of one tensor, and its place in the buffer."""

    item: WriteItem
    dtype: torch.dtype
    sizes: tuple[int, ...]
    byte_offset: int

    @classmethod
    def of(cls, item: WriteItem, byte_offset: int) -> Self:
        """The box that an item writes."""
        assert item.tensor_data is not None, "the state holds tensors only"
        data = item.tensor_data
        return cls(item, data.properties.dtype, tuple(data.chunk.sizes), byte_offset)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, without padding."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Of one rank."""

    parts: tuple[Part, ...]
    layout: Layout
    tensors: Mapping[str, TensorInfo]
    """Every tensor of the state, whole. On ranks that commit; empty on the others."""

    def fill(self, state: State, buffer: Tensor) -> None:
        """Copy this rank's parts of `state`, which has the tensors of the plan, into `buffer` ([nbytes], uint8, on CPU).

        Returns when they are there. Not collective; only copies, and nothing is allocated.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        on_device = False
        with torch.no_grad():
            for part in self.parts:
                source = planner.lookup_object(part.item.index).detach()
                on_device |= source.device.type != "cpu"
                room = buffer.narrow(0, part.byte_offset, part.nbytes).view(part.dtype).view(part.sizes)
                room.copy_(source, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()


def plan_save(state: State, world: World, *, per_node: bool = False) -> SavePlan:
    """The plan for states like this one. Collective; what a tensor holds does not matter.

    With `per_node`, ranks also copy what only other nodes write, so that each node has all that its own ranks hold.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=world.env.is_primary)
    tensors: dict[str, TensorInfo] = {}

    def decide(plans: list[_Items]) -> list[_Items]:
        decided, metadata = planner.create_global_plan(
            [DcpPlan(list(plan.items), planner_data={}) for plan in plans]
        )
        for fqn, told in metadata.state_dict_metadata.items():
            assert isinstance(told, TensorStorageMetadata), f"{fqn} of the state is not a tensor"
            tensors[fqn] = TensorInfo(dtype=_name_of(told.properties.dtype), shape=tuple(told.size))
        mine = [_Items(plan.items) for plan in decided]
        return _with_nodes_own(plans, mine, world.env.local_world_size) if per_node else mine

    planned = world.decide(_Items(planner.create_local_plan().items), decide)
    parts = tuple(_placed(planned.items, 0))
    nbytes = _end_of(parts)
    node_parts = tuple(_placed(planned.node_items, nbytes))
    rank = world.env.rank
    layout = Layout(
        nbytes=_end_of((*parts, *node_parts)),
        objects=_objects(parts, f"{rank}-"),
        node_objects=_objects(node_parts, f"{rank}-node-"),
    )
    # Every node commits its own checkpoint.
    told = world.from_primary(lambda: tensors) if per_node else tensors
    return SavePlan(parts=(*parts, *node_parts), layout=layout, tensors=told)


@dataclass(frozen=True, slots=True)
class _Items:
    """What a rank writes: before rank 0 has decided, all that it holds."""

    items: Sequence[WriteItem]
    node_items: Sequence[WriteItem] = ()


def _with_nodes_own(held: Sequence[_Items], planned: Sequence[_Items], ranks_per_node: int) -> list[_Items]:
    """The plans, with what ranks of a node hold and none of them writes, shared out among those that do."""
    found = []
    for first in range(0, len(held), ranks_per_node):
        ranks = range(first, first + ranks_per_node)
        written = {_box_of(item) for rank in ranks for item in planned[rank].items}
        nbytes = dict.fromkeys(ranks, 0)
        extra: dict[int, list[WriteItem]] = {rank: [] for rank in ranks}
        holders: dict[Hashable, list[tuple[int, WriteItem]]] = defaultdict(list)
        for rank in ranks:
            for item in held[rank].items:
                holders[_box_of(item)].append((rank, item))
        for box, of_box in holders.items():
            if box not in written:
                rank, item = min(of_box, key=lambda one: nbytes[one[0]])
                extra[rank].append(item)
                nbytes[rank] += Part.of(item, 0).nbytes
        found += [_Items(planned[rank].items, extra[rank]) for rank in ranks]
    return found


def _box_of(item: WriteItem) -> Hashable:
    return item.index.fqn, item.index.offset


def _placed(items: Sequence[WriteItem], byte_offset: int) -> Iterator[Part]:
    for item in items:
        part = Part.of(item, byte_offset)
        if part.nbytes:
            yield part
            byte_offset += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _end_of(parts: Sequence[Part]) -> int:
    """Aligned."""
    return max((-(-(part.byte_offset + part.nbytes) // _ALIGNMENT) * _ALIGNMENT for part in parts), default=0)


def _objects(parts: Sequence[Part], prefix: str) -> tuple[PlannedObject, ...]:
    """Chunks gathered into objects of about OBJECT_BYTES, in the order of the buffer."""
    groups: list[list[PlannedChunk]] = []
    for chunk in (chunk for part in parts for chunk in _chunks(part)):
        if not groups or chunk.begin + chunk.length - groups[-1][0].begin > OBJECT_BYTES:
            groups.append([])
        groups[-1].append(chunk)
    return tuple(
        PlannedObject(
            name=f"{prefix}{number}.distcp",
            begin=chunks[0].begin,
            end=chunks[-1].begin + chunks[-1].length,
            chunks=tuple(chunks),
        )
        for number, chunks in enumerate(groups)
    )


def _chunks(part: Part) -> Iterator[PlannedChunk]:
    """The part in slices of at most OBJECT_BYTES, each contiguous in it."""
    assert part.item.tensor_data is not None, "the state holds tensors only"
    offsets = tuple(part.item.tensor_data.chunk.offsets)
    dim = next((d for d, size in enumerate(part.sizes) if size > 1), 0)
    slices = part.sizes[dim] if part.sizes else 1
    slice_bytes = part.nbytes // slices
    most = max(1, OBJECT_BYTES // slice_bytes)
    for first in range(0, slices, most):
        count = min(most, slices - first)
        yield PlannedChunk(
            fqn=part.item.index.fqn,
            offsets=_with(offsets, dim, offsets[dim] + first) if offsets else (),
            sizes=_with(part.sizes, dim, count) if part.sizes else (),
            begin=part.byte_offset + first * slice_bytes,
            length=count * slice_bytes,
        )


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
