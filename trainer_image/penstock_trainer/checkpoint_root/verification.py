"""A checkpoint read to its last byte and compared with what its manifest and its index say."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock_trainer.checkpoint_root.index import IndexedChunk, IndexedTensor, parse_index
from penstock_trainer.checkpoint_root.root import CheckpointRoot, Finding, difference
from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest, manifest_uri, step_dir_uri
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import Crc32c, ObjectCorruptError, ObjectInfo, ObjectNotFoundError, join

_PIECE_BYTES = 16 << 20
"""Of one read."""
_READERS = 4
"""Objects at once: with a piece each, and a copy of it while it arrives, 128 MiB of memory."""


def verify(
    root: CheckpointRoot, step: int, *, on_bytes: Callable[[int], None] = lambda _: None
) -> list[Finding]:
    """Everything that is wrong with the checkpoint of a step; empty when it is as it was written.

    Every byte is read, in pieces, and held against size, crc32c and sha256 of the manifest; the index may name only
    objects of the manifest, and its chunks must lie inside of their objects and make up their tensors. `on_bytes` is
    called with the size of each piece, from several threads. Raises StorageError when storage does not answer.
    """
    try:
        manifest = root.manifest(step)
    except (ObjectNotFoundError, ObjectCorruptError, ContractError) as exc:
        return [Finding(manifest_uri(root.uri, step), f"cannot be read: {exc}")]
    with ThreadPoolExecutor(_READERS) as pool:
        checks = [
            pool.submit(_check_object, root, manifest, entry, info, on_bytes)
            for entry, info in root.standing(manifest, checksums=False)
        ]
        try:
            findings = [finding for check in checks for finding in check.result()]
        except BaseException:  # an interrupt too: the rest is not worth waiting for
            pool.shutdown(cancel_futures=True)
            raise
    index_uri = join(step_dir_uri(root.uri, step), manifest.index)
    if index_uri in {finding.uri for finding in findings}:
        return findings
    return [*findings, *_check_index(root, manifest, index_uri)]


def _check_object(
    root: CheckpointRoot,
    manifest: Manifest,
    entry: CheckpointObject,
    info: ObjectInfo | None,
    on_bytes: Callable[[int], None],
) -> list[Finding]:
    uri = join(step_dir_uri(root.uri, manifest.step), entry.name)
    if problem := difference(entry, info):
        return [Finding(uri, problem)]
    assert info is not None, "a missing object differs"
    crc, sha = Crc32c(), hashlib.sha256()
    try:
        for start in range(0, info.size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, info.size - start)
            piece = root.storage.read(uri, start=start, length=length, generation=info.generation)
            crc.update(piece)
            sha.update(piece)
            on_bytes(length)
    except (ObjectNotFoundError, ObjectCorruptError) as exc:
        return [Finding(uri, f"cannot be read: {exc}")]
    expected = (("crc32c", entry.crc32c), ("sha256", entry.sha256))
    found = (crc.base64, sha.hexdigest())
    other = [
        f"{name} {new} instead of {old}"
        for (name, old), new in zip(expected, found, strict=True)
        if old != new
    ]
    return [Finding(uri, f"has other bytes than were written: {', '.join(other)}")] if other else []


def _check_index(root: CheckpointRoot, manifest: Manifest, uri: str) -> Iterator[Finding]:
    sizes = {entry.name: entry.size for entry in manifest.objects}
    try:
        tensors = parse_index(root.storage.read(uri), uri)
    except (ObjectNotFoundError, ObjectCorruptError, ContractError) as exc:
        yield Finding(uri, f"cannot be read: {exc}")
        return
    for tensor in tensors:
        for problem in _check_tensor(tensor, sizes):
            yield Finding(uri, f"is wrong about {tensor.name}: {problem}")


def _check_tensor(tensor: IndexedTensor, object_sizes: Mapping[str, int]) -> Iterator[str]:
    for chunk in tensor.chunks:
        yield from _check_chunk(chunk, tensor, object_sizes)
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if held != math.prod(tensor.shape):
        yield f"its chunks hold {held} elements of {math.prod(tensor.shape)}"


def _check_chunk(
    chunk: IndexedChunk, tensor: IndexedTensor, object_sizes: Mapping[str, int]
) -> Iterator[str]:
    end = chunk.byte_offset + chunk.length
    if chunk.object not in object_sizes:
        yield f"a chunk lies in {chunk.object}, which the manifest does not name"
    elif not 0 <= chunk.byte_offset <= end <= object_sizes[chunk.object]:
        yield (
            f"a chunk has bytes {chunk.byte_offset} to {end} of {chunk.object}, which has "
            f"{object_sizes[chunk.object]}"
        )
    if chunk.length != math.prod(chunk.sizes) * tensor.item_bytes:
        yield f"a chunk of {list(chunk.sizes)} {tensor.dtype} has {chunk.length} bytes"
    if not _is_inside(chunk, tensor.shape):
        yield f"a chunk of {list(chunk.sizes)} at {list(chunk.offsets)} is not inside of {list(tensor.shape)}"


def _is_inside(chunk: IndexedChunk, shape: Sequence[int]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    boxes = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in boxes)
