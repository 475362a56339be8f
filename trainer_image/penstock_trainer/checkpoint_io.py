"""torch.distributed.checkpoint on the Storage Protocol: one object of raw bytes per rank, and an index in JSON.

The stock writers rename files, which object stores cannot, and keep the index as a pickle, which whoever may write to
the bucket could make run code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest
from penstock_trainer.contract.fields import ContractError, canonical_json
from penstock_trainer.storage import Buffer, ObjectCorruptError, Storage, crc32c, join

_READ_BYTES = 64 * 1024 * 1024
"""Adjoining chunks are read together up to this size: one request then moves enough to hide its latency."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the bytes that hold it, row-major and little-endian."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    object: str
    byte_offset: int
    length: int
    """Bytes."""
    crc32c: str


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor of the checkpoint."""

    dtype: str
    """Its name in torch, such as `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def write_object(
    storage: Storage,
    directory_uri: str,
    name: str,
    data: Buffer,
    content_type: str,
    *,
    if_generation_match: int | None = None,
) -> CheckpointObject:
    """Write one object below `directory_uri` and describe it. Raises StorageError, see Storage.write."""
    info = storage.write(
        join(directory_uri, name), data, if_generation_match=if_generation_match, content_type=content_type
    )
    return CheckpointObject(
        name=name,
        generation=info.generation,
        size=info.size,
        crc32c=info.crc32c,
        sha256=hashlib.sha256(data).hexdigest(),
    )


class ObjectWriter(StorageWriter):
    """Writes `<attempt>/<rank>.distcp` on every rank and `<attempt>/index.json` on rank 0."""

    def __init__(self, storage: Storage, step_dir_uri: str, *, attempt: str, rank: int) -> None:
        self.written: list[CheckpointObject] = []
        """What this rank has written; complete when `torch.distributed.checkpoint.save` returns."""
        self._storage = storage
        self._step_dir_uri = step_dir_uri
        self._data_name = f"{attempt}/{rank}.distcp"
        self.index_name = f"{attempt}/index.json"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageWriter."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See StorageWriter."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All of this rank's tensors as one object; blocks until it is stored."""
        data = bytearray()
        results = []
        for item in plan.items:
            raw = _bytes_of(planner.resolve_data(item))
            if raw:
                chunk = self._chunk(item, len(data), raw)
                results.append(WriteResult(index=item.index, size_in_bytes=len(raw), storage_data=chunk))
                data += raw
        if data:
            self._write(self._data_name, data, "application/octet-stream")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            chunks[result.index.fqn].append(result.storage_data)
        tensors = {}
        for fqn, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{fqn} of the state is not a tensor"
            tensors[fqn] = IndexedTensor(
                _name_of(tensor.properties.dtype), tuple(tensor.size), tuple(chunks[fqn])
            )
        self._write(self.index_name, canonical_json({"tensors": tensors}).encode(), "application/json")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """See StorageWriter. Never asked: the writer is always given."""
        return False

    def _chunk(self, item: WriteItem, byte_offset: int, raw: memoryview) -> Chunk:
        assert item.tensor_data is not None, "the state holds tensors only"
        box = item.tensor_data.chunk
        return Chunk(
            offsets=tuple(box.offsets),
            sizes=tuple(box.sizes),
            object=self._data_name,
            byte_offset=byte_offset,
            length=len(raw),
            crc32c=crc32c(raw),
        )

    def _write(self, name: str, data: Buffer, content_type: str) -> None:
        self.written.append(write_object(self._storage, self._step_dir_uri, name, data, content_type))


class ObjectReader(StorageReader):
    """Reads what a manifest names, pinned to its generations; every chunk that is read is verified.

    Raises StorageError for an object that is gone or is not the one that was written.
    """

    def __init__(self, storage: Storage, step_dir_uri: str, manifest: Manifest) -> None:
        self._storage = storage
        self._step_dir_uri = step_dir_uri
        self._manifest = manifest
        self._objects = {entry.name: entry for entry in manifest.objects}
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[IndexedTensor, Chunk]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageReader."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """From the index."""
        tensors = self._read_index()
        self._chunks = {
            (fqn, chunk.offsets): (tensor, chunk)
            for fqn, tensor in tensors.items()
            for chunk in tensor.chunks
        }
        return Metadata({fqn: _metadata_of(tensor) for fqn, tensor in tensors.items()})

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
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None, "a chunk of a tensor is looked up by its offset"
            wanted[item.storage_index.fqn, tuple(offset)].append(item)
        located = [(*self._chunks[key], items) for key, items in wanted.items()]
        located.sort(key=lambda found: (found[1].object, found[1].byte_offset))
        for span in _spans(located):
            self._fill(span, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """See StorageReader. Never asked: the reader is always given."""
        return False

    def _fill(self, span: Sequence[_Located], planner: LoadPlanner) -> None:
        first, last = span[0][1], span[-1][1]
        entry = self._objects.get(first.object)
        if entry is None:
            raise ObjectCorruptError(
                f"{self._step_dir_uri}: the index names {first.object}, which the manifest does not."
            )
        uri = join(self._step_dir_uri, entry.name)
        length = last.byte_offset + last.length - first.byte_offset
        # A bytearray: torch takes no read-only buffer.
        data = memoryview(
            bytearray(
                self._storage.read(uri, start=first.byte_offset, length=length, generation=entry.generation)
            )
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

    def _read_index(self) -> dict[str, IndexedTensor]:
        entry = self._objects[self._manifest.index]
        uri = join(self._step_dir_uri, entry.name)
        data = self._storage.read(uri, generation=entry.generation)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ObjectCorruptError(f"{uri} is corrupt: its sha256 is not the manifest's {entry.sha256}.")
        try:
            return {fqn: _indexed_tensor(told) for fqn, told in json.loads(data)["tensors"].items()}
        except (KeyError, TypeError, ValueError) as exc:
            raise ContractError(f"{uri} is not a checkpoint index: {exc!r}") from exc


_Located = tuple[IndexedTensor, Chunk, list[ReadItem]]


def _spans(located: Sequence[_Located]) -> Iterator[list[_Located]]:
    """Runs of chunks that lie one after the other in an object, each small enough for one read."""
    span: list[_Located] = []
    for found in located:
        chunk = found[1]
        if span:
            first, last = span[0][1], span[-1][1]
            adjoins = (last.object, last.byte_offset + last.length) == (chunk.object, chunk.byte_offset)
            if not adjoins or chunk.byte_offset + chunk.length - first.byte_offset > _READ_BYTES:
                yield span
                span = []
        span.append(found)
    if span:
        yield span


def _indexed_tensor(told: Mapping[str, Any]) -> IndexedTensor:
    chunks = tuple(
        Chunk(**{**chunk, "offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
        for chunk in told["chunks"]
    )
    return IndexedTensor(told["dtype"], tuple(told["shape"]), chunks)


def _metadata_of(tensor: IndexedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in tensor.chunks
        ],
    )


def _bytes_of(tensor: Tensor | Any) -> memoryview:
    assert isinstance(tensor, Tensor), "the state holds tensors only"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
