"""The index of a checkpoint: which chunk of which tensor lies where."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.contract.fields import ContractError, load_json
from penstock_trainer.storage import ObjectCorruptError, Storage, join

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class IndexedChunk:
    """A box of a tensor, and the bytes of the object that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    object: str
    byte_offset: int
    length: int
    """Bytes."""
    crc32c: str
    """Of them, as Cloud Storage spells it."""


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor of the checkpoint."""

    name: str
    """Begins with its group: `model.`, `opt.` or `loss_scale.`."""
    dtype: str
    """Its name in torch, such as `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[IndexedChunk, ...]

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


def read_index(storage: Storage, step_dir_uri: str, manifest: Manifest) -> list[IndexedTensor]:
    """The tensors of the checkpoint in a step's directory, by name. Blocks on storage.

    Raises StorageError, ObjectCorruptError when the object is not the index that was written, and ContractError when it is
    none.
    """
    [entry] = (entry for entry in manifest.objects if entry.name == manifest.index)
    uri = join(step_dir_uri, entry.name)
    data = storage.read(uri, generation=entry.generation)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ObjectCorruptError(f"{uri} is corrupt: its sha256 is not the manifest's {entry.sha256}.")
    return parse_index(data, uri)


def parse_index(data: bytes, uri: str) -> list[IndexedTensor]:
    """Raises ContractError, which names `uri`, when the bytes are not an index."""
    told = load_json(data, uri)
    try:
        return [_tensor(name, tensor) for name, tensor in sorted(told["tensors"].items())]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ContractError(f"{uri} is not a checkpoint index: {exc!r}") from exc


def _tensor(name: str, told: Mapping[str, Any]) -> IndexedTensor:
    if told["dtype"] not in _ITEM_BYTES:
        raise ValueError(f"tensor {name} has the unknown dtype {told['dtype']!r}")
    chunks = tuple(
        IndexedChunk(
            offsets=_ints(chunk["offsets"]),
            sizes=_ints(chunk["sizes"]),
            object=str(chunk["object"]),
            byte_offset=int(chunk["byte_offset"]),
            length=int(chunk["length"]),
            crc32c=str(chunk["crc32c"]),
        )
        for chunk in told["chunks"]
    )
    return IndexedTensor(name, told["dtype"], _ints(told["shape"]), chunks)


def _ints(values: list[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
