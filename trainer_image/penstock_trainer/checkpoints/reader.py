"""Checkpoints read by torch.distributed.checkpoint, on the Storage Protocol: raw bytes, and an index in JSON.

The stock formats keep the index as a pickle, which whoever may write to the bucket could make run code.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock_trainer.checkpoint_root import IndexedChunk, IndexedTensor, read_index
from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.storage import ObjectCorruptError, Storage, crc32c, join

_READ_BYTES = 64 * 1024 * 1024
"""Neighbouring chunks are read together up to this size: one request then moves enough to hide its latency."""
_GAP_BYTES = 2**20
"""That are read for nothing between two neighbours: padding, or what other ranks need; cheaper than a request."""
_READS_AT_ONCE = 4


class ObjectReader(StorageReader):
    """Reads what a manifest names, pinned to its generations; every chunk that is read is verified.

    Raises StorageError for an object that is gone or is not the one that was written.
    """

    def __init__(self, storage: Storage, step_dir_uri: str, manifest: Manifest) -> None:
        self._storage = storage
        self._step_dir_uri = step_dir_uri
        self._manifest = manifest
        self._objects = {entry.name: entry for entry in manifest.objects}
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[IndexedTensor, IndexedChunk]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageReader."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """From the index."""
        tensors = read_index(self._storage, self._step_dir_uri, self._manifest)
        self._chunks = {
            (tensor.name, chunk.offsets): (tensor, chunk) for tensor in tensors for chunk in tensor.chunks
        }
        return Metadata({tensor.name: _metadata_of(tensor) for tensor in tensors})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See StorageReader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan; blocks until they are."""
        self._require_covered(plan, planner)
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None, "a chunk of a tensor is looked up by its offset"
            wanted[item.storage_index.fqn, tuple(offset)].append(item)
        located = [(*self._chunks[key], items) for key, items in wanted.items()]
        located.sort(key=lambda found: (found[1].object, found[1].byte_offset))
        with warnings.catch_warnings(), ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            # Of a read-only buffer, which is only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            list(pool.map(lambda span: self._fill(span, planner), _spans(located)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """See StorageReader. Never asked: the reader is always given."""
        return False

    def _require_covered(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """The stock planner leaves elements that no chunk has as they were."""
        assert isinstance(planner, DefaultLoadPlanner)
        covered: Counter[str] = Counter()
        for item in plan.items:
            covered[item.dest_index.fqn] += math.prod(item.lengths)
        for fqn, tensor in planner.state_dict.items():
            held = sum(math.prod(chunk.sizes) for chunk in _create_chunk_list(tensor))
            if covered[fqn] != held:
                raise ObjectCorruptError(
                    f"{self._step_dir_uri}: its index has {covered[fqn]} of the {held} elements of {fqn} that this rank "
                    "needs."
                )

    def _fill(self, span: Sequence[_Located], planner: LoadPlanner) -> None:
        first, last = span[0][1], span[-1][1]
        entry = self._objects.get(first.object)
        if entry is None:
            raise ObjectCorruptError(
                f"{self._step_dir_uri}: the index names {first.object}, which the manifest does not."
            )
        uri = join(self._step_dir_uri, entry.name)
        length = last.byte_offset + last.length - first.byte_offset
        data = memoryview(
            self._storage.read(uri, start=first.byte_offset, length=length, generation=entry.generation)
        )
        for tensor, chunk, items in span:
            start = chunk.byte_offset - first.byte_offset
            raw = data[start : start + chunk.length]
            if crc32c(raw) != chunk.crc32c:
                raise ObjectCorruptError(
                    f"{uri}: bytes {chunk.byte_offset} to {chunk.byte_offset + chunk.length} are corrupt: "
                    f"expected crc32c {chunk.crc32c}, found {crc32c(raw)}."
                )
            box = torch.frombuffer(raw, dtype=getattr(torch, tensor.dtype)).view(chunk.sizes)
            for item in items:
                source = _narrow(box, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)


_Located = tuple[IndexedTensor, IndexedChunk, list[ReadItem]]


def _spans(located: Sequence[_Located]) -> Iterator[list[_Located]]:
    """Runs of neighbouring chunks of an object, each small enough for one read."""
    span: list[_Located] = []
    for found in located:
        chunk = found[1]
        if span:
            first, last = span[0][1], span[-1][1]
            gap = chunk.byte_offset - (last.byte_offset + last.length)
            adjoins = chunk.object == last.object and 0 <= gap <= _GAP_BYTES
            if not adjoins or chunk.byte_offset + chunk.length - first.byte_offset > _READ_BYTES:
                yield span
                span = []
        span.append(found)
    if span:
        yield span


def _metadata_of(tensor: IndexedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in tensor.chunks
        ],
    )


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
