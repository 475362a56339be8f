"""A contiguous part of a flattened tensor, as torch.distributed.checkpoint can save and fill it.

ZeRO gives each rank a range of the flattened parameters, which may begin and end anywhere in one. A range of an
n-dimensional tensor is a few boxes, and boxes are what checkpoints are made of: so ranks write what they hold, with no
gather, and any layout can be loaded into any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that is contiguous in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Of its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, numel: int) -> Iterator[Box]:
    """The fewest boxes that make up elements [start, start + numel) of a flattened tensor, in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    end = start + numel
    while start < end:
        # The outermost dim in which a whole slice begins here and ends within the range.
        dim = next(d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= end)
        offsets = tuple(start // strides[d] % shape[d] for d in range(len(shape)))
        slices = min((end - start) // strides[dim], shape[dim] - offsets[dim])
        box = Box(offsets, (*[1] * dim, slices, *shape[dim + 1 :]), start)
        yield box
        start += box.numel


class FlatShard(Tensor):
    """Stands for a whole tensor of `shape` of which this rank holds `flat`, beginning at element `start`.

    It has no arithmetic: it exists for the checkpoint planner, which reads and writes `flat` through it.
    """

    _flat: Tensor
    _boxes: dict[torch.Size, Box]
    _start: int

    @staticmethod
    def __new__(cls, flat: Tensor, *, shape: torch.Size, start: int) -> FlatShard:
        """View `flat`, one-dimensional, as a part of a tensor."""
        make: Any = Tensor._make_wrapper_subclass
        self = cast("FlatShard", make(cls, shape, dtype=flat.dtype, device=flat.device))
        self._flat = flat
        self._start = start
        self._boxes = {torch.Size(box.offsets): box for box in boxes_of(shape, start, flat.numel())}
        return self

    @property
    def flat(self) -> Tensor:
        """What this rank holds, one-dimensional."""
        return self._flat

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out that it is a class method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operation."""
        raise TypeError(f"{func} on a FlatShard: it can only be saved and loaded.")

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """One item per box; see the checkpoint planner's _Checkpointable."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes))
            for offsets, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of `flat` that is the box at an offset."""
        assert index.offset is not None, "a shard is looked up by its offset"
        box = self._boxes[index.offset]
        return self._flat.narrow(0, box.start - self._start, box.numel).view(box.sizes)
