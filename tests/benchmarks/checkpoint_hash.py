"""What hashing costs the writer: our one pass over an object (SHA-256, its CRC32C, and one for each chunk) beside SHA-256."""

from __future__ import annotations

import hashlib
import time

import numpy as np

from benchmarks.rows import Samples
from benchmarks.transfer_arms import host_buffer
from penstock_trainer.checkpoints.layout import PlannedChunk, PlannedObject
from penstock_trainer.checkpoints.save_plan import OBJECT_BYTES
from penstock_trainer.checkpoints.writer import hashed

_CHUNKS = 8


def seconds_per_gib(rounds: int) -> tuple[Samples, Samples]:
    """CPU seconds a GiB: (ours, hashlib.sha256 alone), in turns."""
    data = host_buffer(OBJECT_BYTES)
    size = OBJECT_BYTES // _CHUNKS
    chunks = tuple(
        PlannedChunk(fqn=str(number), offsets=(0,), sizes=(size,), begin=number * size, length=size)
        for number in range(_CHUNKS)
    )
    planned = PlannedObject(name="0-0.distcp", begin=0, end=OBJECT_BYTES, chunks=chunks)
    ways = [lambda: hashed(data, planned), lambda: hashlib.sha256(data).hexdigest()]
    taken: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.process_time()
            ways[side]()
            taken[side].append((time.process_time() - began) / OBJECT_BYTES * 2**30)
    return np.array(taken[0]), np.array(taken[1])
