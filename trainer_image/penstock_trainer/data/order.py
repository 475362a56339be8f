"""Which samples a step trains on.

The position in the data is the number of samples seen and nothing else: sample i of an epoch is P(i), where P is a
permutation that is computed, never stored. So there is no loader state to save, a resumed run repeats no batch, and the
order does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]


def sample_order(first: int, count: int, *, size: int, seed: int) -> Indices:
    """Of samples [first, first + count) of a run, which ones of a split of `size` they are; epochs follow one another."""
    samples = np.arange(first, first + count, dtype=np.uint64)
    epochs, within = np.divmod(samples, np.uint64(size))
    chosen = np.empty_like(within)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        chosen[of_epoch] = Permutation(size, f"{seed}/{epoch}")(within[of_epoch])
    return chosen


class Permutation:
    """A bijection of [0, size) that depends on the key alone, computed value by value in constant memory.

    A four-round Feistel network on the smallest square power of two that holds `size`; a value that falls outside walks
    on along its cycle until it is inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). The domain
    is under four times the size, so a walk takes fewer than four turns on average.
    """

    _ROUNDS = 4

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.sha256(key.encode()).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8", count=self._ROUNDS).astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Where each index of [0, size) goes."""
        images = self._encrypt(indices.astype(np.uint64))
        while (outside := images >= self.size).any():
            images[outside] = self._encrypt(images[outside])
        return images

    def _encrypt(self, values: Indices) -> Indices:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: Indices) -> Indices:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014); unsigned arithmetic wraps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
