"""Every element of the state is written once, in objects of a size that storage likes."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from penstock_trainer.checkpoints.layout import Layout, PlannedChunk, PlannedObject
from penstock_trainer.checkpoints.save_plan import OBJECT_BYTES, _Items, _with_nodes_own, plan_save
from penstock_trainer.contract.fields import from_dict
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.testing import run_ranks
from penstock_trainer.world import World
from unit.penstock_trainer.checkpoints.one_matrix import Run, progress_at

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


def elements(chunks: Sequence[PlannedChunk], shape: Sequence[int], *, stride: int) -> Iterator[Any]:
    """(element's indices, its byte in the buffer), of chunks that are row-major there."""
    for chunk in chunks:
        places = itertools.product(
            *(range(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        )
        for number, place in enumerate(places):
            yield place, chunk.begin + number * stride


def require_sound(objects: Sequence[PlannedObject], nbytes: int) -> None:
    """Objects and their chunks lie one after the other in the buffer, each as long as told."""
    end = 0
    for planned in objects:
        assert end <= planned.begin == planned.chunks[0].begin
        at = planned.begin
        for chunk in planned.chunks:
            assert at <= chunk.begin < at + 64
            at = chunk.begin + chunk.length
        assert at == planned.end
        end = planned.end
    assert end <= nbytes


SHAPES = st.lists(
    st.lists(st.sampled_from([1, 2, 3, 5, 700, 5000, 70_000]), max_size=4).filter(
        lambda shape: math.prod(shape) < 2**29
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(shapes=SHAPES, data=st.data())
def test_big_tensors_are_cut_in_contiguous_slices_of_the_first_dim_that_has_any(
    world: World, shapes: list[list[int]], data: st.DataObject
) -> None:
    # Memory that is not touched costs nothing: only its shape is planned.
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    tensors = {
        str(number): torch.empty(shape, dtype=dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    plan = plan_save({"model": tensors}, world)

    require_sound(plan.layout.objects, plan.layout.nbytes)
    assert len({planned.name for planned in plan.layout.objects}) == len(plan.layout.objects)
    by_tensor: dict[str, list[PlannedChunk]] = defaultdict(list)
    for planned in plan.layout.objects:
        assert planned.end - planned.begin <= OBJECT_BYTES or len(planned.chunks) == 1
        for chunk in planned.chunks:
            by_tensor[chunk.fqn].append(chunk)
    for number, shape in enumerate(shapes):
        require_cut(by_tensor[f"model.{number}"], shape, dtypes[number].itemsize)


def require_cut(chunks: Sequence[PlannedChunk], shape: Sequence[int], itemsize: int) -> None:
    dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    slice_bytes = math.prod(shape[dim + 1 :]) * itemsize
    at, first = chunks[0].begin, 0
    for chunk in chunks:
        assert chunk.begin == at, "slices of a tensor follow each other"
        assert chunk.length == math.prod(chunk.sizes) * itemsize
        assert chunk.length <= max(OBJECT_BYTES, slice_bytes)
        if shape:
            assert chunk.offsets == (*[0] * dim, first, *[0] * (len(shape) - dim - 1))
            assert chunk.sizes == (*shape[:dim], chunk.sizes[dim], *shape[dim + 1 :])
            first += chunk.sizes[dim]
        at += chunk.length
    assert at - chunks[0].begin == math.prod(shape) * itemsize
    # No more of them than there have to be.
    most = max(1, OBJECT_BYTES // slice_bytes)
    assert len(chunks) == -(-(shape[dim] if shape else 1) // most)


def test_what_is_saved_is_read_back_bit_by_bit(tmp_path: Path, world: World) -> None:
    torch.manual_seed(7)
    shapes = [(), (1,), (3, 5), (1, 7, 2), (2, 3, 4, 5)]
    bits = {
        f"{str(dtype).removeprefix('torch.')}-{number}": torch.randint(
            0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8
        )
        .view(dtype)
        .view(shape)
        for dtype in DTYPES
        if not dtype.is_floating_point
        for number, shape in enumerate(shapes)
    }
    floats = {
        f"{str(dtype).removeprefix('torch.')}-{number}": torch.randn(shape).to(dtype)
        for dtype in DTYPES
        if dtype.is_floating_point
        for number, shape in enumerate(shapes)
    }
    state = {
        "model": {
            **bits,
            **floats,
            "transposed": torch.randn(5, 3).t(),
            "every-other": torch.arange(20.0)[::2],
            "empty": torch.empty(0, 4),
            # One more object's worth and a bit, whose first dim is of no use.
            "big": torch.randint(0, 256, (1, 65, 2**20), dtype=torch.uint8),
        }
    }
    run = Run(tmp_path / "root", world)
    owner = run.attempt()
    with run.checkpointer(owner, like=state) as checkpoints:
        checkpoints.save(progress_at(4), state)
        expected = {name: tensor.clone() for name, tensor in state["model"].items()}
        # The copy is what is written: what training does next is not in it.
        for tensor in state["model"].values():
            tensor.zero_()
        assert checkpoints.finish()

    assert run.restorer().restore(state) == progress_at(4)
    for name, tensor in expected.items():
        found = state["model"][name]
        assert found.dtype == tensor.dtype
        assert torch.equal(as_bytes(found), as_bytes(tensor)), name
    sizes = [path.stat().st_size for path in run.objects(4).values()]
    assert max(sizes) <= OBJECT_BYTES
    assert sum(size >= 2**20 for size in sizes) == 2


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the two ranks."""
    directory = str(tmp_path_factory.mktemp("plans"))
    ranks = run_ranks("distributed.checkpoint_ranks", ["plans", directory], world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr
    return [json.loads(rank.stdout)["plans"] for rank in ranks]


SHAPES_OF_TWO = {
    "model.replicated": (5, 3),
    "model.rows": (5, 3),
    "model.flat": (5, 3),
    "opt.state.replicated.step": (),
}


def written(plan: Mapping[str, Any], *, objects: str) -> Counter[Any]:
    """How often each element is in a rank's objects, each of which has its value in the buffer."""
    layout = from_dict(Layout, plan["layout"])
    buffer = bytes.fromhex(plan["buffer"])
    planned = layout.objects if objects == "objects" else layout.node_objects
    require_sound(planned, layout.nbytes)
    found: Counter[Any] = Counter()
    for chunk in (chunk for one in planned for chunk in one.chunks):
        for place, begin in elements([chunk], SHAPES_OF_TWO[chunk.fqn], stride=4):
            value = float(np.frombuffer(buffer, "<f4", 1, begin)[0])
            assert value == (1.0 + 3 * place[0] + place[1] if place else 1.0)
            found[chunk.fqn, place] += 1
    return found


def everything() -> set[Any]:
    return {
        (fqn, place)
        for fqn, shape in SHAPES_OF_TWO.items()
        for place in itertools.product(*map(range, shape))
    }


@pytest.mark.parametrize("nodes", ["one node", "two nodes"])
def test_every_element_of_the_state_is_written_once_over_ranks(
    plans: list[dict[str, Any]], nodes: str
) -> None:
    by_rank = [written(plan[nodes], objects="objects") for plan in plans]
    assert sum(by_rank, Counter()) == Counter(everything())
    assert all(by_rank)
    assert {fqn: tuple(told["shape"]) for fqn, told in plans[0][nodes]["tensors"].items()} == SHAPES_OF_TWO


def test_nodes_write_for_themselves_what_only_others_write_and_they_hold(plans: list[dict[str, Any]]) -> None:
    together = [written(plan["one node"], objects="node_objects") for plan in plans]
    assert together == [Counter(), Counter()]

    for plan in plans:
        mine = written(plan["two nodes"], objects="objects")
        besides = written(plan["two nodes"], objects="node_objects")
        both = mine + besides
        assert set(both.values()) == {1}
        # What each of two ranks holds: all of two tensors, and its part of the others.
        assert {place for fqn, place in both if fqn == "model.replicated"} == set(
            itertools.product(range(5), range(3))
        )
        assert ("opt.state.replicated.step", ()) in both
        assert plan["two nodes"]["tensors"] == plans[0]["two nodes"]["tensors"]
    names = [
        one["name"]
        for plan in plans
        for one in (*plan["two nodes"]["layout"]["objects"], *plan["two nodes"]["layout"]["node_objects"])
    ]
    assert len(set(names)) == len(names)


Box = tuple[str, int]


def item_of(box: Box, rows: int) -> WriteItem:
    fqn, row = box
    offset = torch.Size((row, 0))
    chunk = torch.Size((rows, 3))
    return WriteItem(
        index=MetadataIndex(fqn, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=chunk),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size((100, 3)),
        ),
    )


@settings(deadline=None)
@given(
    nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    boxes=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3)), st.integers(1, 5), max_size=8
    ),
    data=st.data(),
)
def test_every_node_has_once_what_its_ranks_hold(
    nodes: int, ranks_per_node: int, boxes: dict[Box, int], data: st.DataObject
) -> None:
    world_size = nodes * ranks_per_node
    some_ranks = st.sets(st.integers(0, world_size - 1), min_size=1)
    holders = {box: sorted(data.draw(some_ranks)) for box in boxes}
    writer = {box: data.draw(st.sampled_from(ranks)) for box, ranks in holders.items()}
    held = [
        _Items([item_of(box, boxes[box]) for box in boxes if rank in holders[box]])
        for rank in range(world_size)
    ]
    planned = [
        _Items([item_of(box, boxes[box]) for box in boxes if rank == writer[box]])
        for rank in range(world_size)
    ]

    found = _with_nodes_own(held, planned, ranks_per_node)

    assert [list(one.items) for one in found] == [list(one.items) for one in planned]
    for first in range(0, world_size, ranks_per_node):
        ranks = range(first, first + ranks_per_node)
        of_node = Counter(
            (item.index.fqn, item.index.offset)
            for rank in ranks
            for item in (*found[rank].items, *found[rank].node_items)
        )
        expected = {(item.index.fqn, item.index.offset) for rank in ranks for item in held[rank].items}
        assert of_node == Counter(expected)
        for rank in ranks:  # no rank is asked for what it has not
            mine = {item.index for item in held[rank].items}
            assert {item.index for item in found[rank].node_items} <= mine
