"""Boxes of a flat range."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from penstock_trainer.engines.flat_shard import FlatShard, boxes_of


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4), (3, 2, 2, 2)])
def test_boxes_of_every_range_are_that_range_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    tensor = torch.arange(numel).view(shape)
    for start, end in itertools.combinations(range(numel + 1), 2):
        boxes = list(boxes_of(shape, start, end - start))
        elements = []
        for box in boxes:
            part = tensor
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            assert part.reshape(-1)[0] == box.start
            elements += part.reshape(-1).tolist()
        assert elements == list(range(start, end))
        assert len(boxes) <= 2 * len(shape) - 1


def test_a_box_is_a_view_of_the_rank_s_memory() -> None:
    flat = torch.arange(7.0)
    shard = FlatShard(flat, shape=torch.Size((4, 3)), start=2)
    chunks = shard.__create_chunk_list__()
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [
        ((0, 2), (1, 1)),
        ((1, 0), (2, 3)),
    ]
    for chunk in chunks:
        shard.__get_tensor_shard__(MetadataIndex("weight", chunk.offsets)).fill_(-1.0)
    assert flat.tolist() == [-1.0] * 7


def test_a_shard_refuses_arithmetic() -> None:
    shard = FlatShard(torch.zeros(2), shape=torch.Size((2, 2)), start=0)
    with pytest.raises(TypeError, match="only be saved and loaded"):
        shard.add(1)
