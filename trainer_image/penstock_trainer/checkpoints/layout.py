"""What a rank's writer is told of the rank's buffer, and what it tells of the objects that it wrote. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_trainer.contract.checkpoint import CheckpointObject


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A whole tensor of the state."""

    dtype: str
    """Its name in torch, such as `float32`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChunk:
    """A box of a tensor, row-major in the buffer."""

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Of its first byte in the buffer."""
    length: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedObject:
    """A stretch of the buffer that becomes one object."""

    name: str
    begin: int
    end: int
    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rank's buffer."""

    nbytes: int
    objects: tuple[PlannedObject, ...]
    """What the world's checkpoint has of this rank."""
    node_objects: tuple[PlannedObject, ...] = ()
    """What other nodes write of it, and a checkpoint of this node alone needs besides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What one rank has written of one save."""

    objects: tuple[CheckpointObject, ...]
    chunks: Mapping[str, Sequence[Mapping[str, Any]]]
    """By tensor, as the index has them."""
