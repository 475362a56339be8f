"""What a rank writes of the state, and where in its buffer each part goes: planned once, for every save of the run.

The parts, and which rank writes what several hold, are torch.distributed.checkpoint's own plan. It does not change while
the run goes on, because tensors keep their shapes and ranks; so no save needs a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """Every tensor of the state, whole. On rank 0; empty on the others."""

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


def plan_save(state: State, world: World) -> SavePlan:
    """The plan for states like this one. Collective; what a tensor holds does not matter."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=world.env.is_primary)
    tensors: dict[str, TensorInfo] = {}

    def decide(plans: list[DcpPlan]) -> list[DcpPlan]:
        decided, metadata = planner.create_global_plan(plans)
        for fqn, told in metadata.state_dict_metadata.items():
            assert isinstance(told, TensorStorageMetadata), f"{fqn} of the state is not a tensor"
            tensors[fqn] = TensorInfo(dtype=_name_of(told.properties.dtype), shape=tuple(told.size))
        return decided

    plan = planner.finish_plan(world.decide(planner.create_local_plan(), decide))
    parts = tuple(_placed(plan.items))
    return SavePlan(parts=parts, layout=_layout(parts, rank=world.env.rank), tensors=tensors)


def _placed(items: Sequence[WriteItem]) -> Iterator[Part]:
    byte_offset = 0
    for item in items:
        assert item.tensor_data is not None, "the state holds tensors only"
        sizes = tuple(item.tensor_data.chunk.sizes)
        part = Part(item, item.tensor_data.properties.dtype, sizes, byte_offset)
        if part.nbytes:
            yield part
            byte_offset += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _layout(parts: Sequence[Part], *, rank: int) -> Layout:
    """Chunks gathered into objects of about OBJECT_BYTES, in the order of the buffer."""
    objects: list[PlannedObject] = []
    open_chunks: list[PlannedChunk] = []
    begin = end = 0

    def close() -> None:
        name = f"{rank}-{len(objects)}.distcp"
        objects.append(PlannedObject(name=name, begin=begin, end=end, chunks=tuple(open_chunks)))
        open_chunks.clear()

    for chunk in (chunk for part in parts for chunk in _chunks(part)):
        if open_chunks and chunk.begin + chunk.length - begin > OBJECT_BYTES:
            close()
        if not open_chunks:
            begin = chunk.begin
        open_chunks.append(chunk)
        end = chunk.begin + chunk.length
    if open_chunks:
        close()
    return Layout(nbytes=end, objects=tuple(objects))


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
