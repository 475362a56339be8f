"""Token shards as one stream of windows, and which windows a step trains on.

The position in the data is the number of samples seen and nothing else: sample i of an epoch is window P(i), where P is
a permutation that is computed, never stored. So there is no loader state to save, a resumed run repeats no batch, and
the order does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.dataset import MANIFEST_NAME, DatasetManifest, DatasetObject
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.errors import BatchError, DatasetError
from penstock_trainer.model.objective import Batch
from penstock_trainer.storage import FileStorage, ObjectInfo, ObjectNotFoundError, join, path_of, storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_DOWNLOADS = 8
"""Shards at once: one stream does not fill a node's link."""

Indices = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How a global batch is cut over the ranks."""

    per_rank: int
    """Samples of a step on each rank: its contiguous part of the global batch."""
    micro_batch: int
    """Samples that go through the model at once."""
    accumulation: int
    """Micro-batches of a step."""

    @classmethod
    def of(cls, config: JobConfig, world_size: int) -> BatchPlan:
        """The fewest equal micro-batches that max_micro_batch allows. Raises BatchError."""
        batch = config.global_batch
        if batch % world_size:
            below, above = batch - batch % world_size, batch + world_size - batch % world_size
            fitting = [size for size in range(1, min(batch, 4096) + 1) if batch % size == 0]
            raise BatchError(
                f"global_batch = {batch} does not divide among {world_size} ranks. "
                f"Give {f'{below} or ' if below else ''}{above}, or use a number of ranks of {fitting}."
            )
        per_rank = batch // world_size
        micro = max(size for size in range(1, config.max_micro_batch + 1) if per_rank % size == 0)
        logger.info(
            "micro_batch=%d accumulation=%d (global_batch %d over %d ranks is %d samples each; "
            "the largest divisor of that up to max_micro_batch %d)",
            *(micro, per_rank // micro, batch, world_size, per_rank, config.max_micro_batch),
        )
        return cls(per_rank=per_rank, micro_batch=micro, accumulation=per_rank // micro)


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


class TokenWindows:
    """The train split as one token stream, cut into windows of seq_len + 1 tokens at a stride of seq_len.

    Each token but the first is the target of exactly one position of the split; what does not fill a last window is
    left out.
    """

    def __init__(self, shards: Sequence[npt.NDArray[np.unsignedinteger]], *, seq_len: int, seed: int) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self._seq_len = seq_len
        self._seed = seed
        self.num_tokens = int(self._starts[-1])
        self.num_windows = max(0, self.num_tokens - 1) // seq_len

    def require_batch(self, global_batch: int) -> None:
        """Raise BatchError unless an epoch holds at least one global batch."""
        if self.num_windows < global_batch:
            raise BatchError(
                f"the train split is too small: its {self.num_tokens} tokens make {self.num_windows} sequences of "
                f"{self._seq_len}, and one global batch takes {global_batch}. It needs at least "
                f"{global_batch * self._seq_len + 1} tokens; stage more data, or lower global_batch or data.seq_len."
            )

    def samples(self, first: int, count: int) -> torch.Tensor:
        """Samples [first, first + count) of the run as int64 [count, seq_len + 1]; epochs follow one another."""
        indices = self.windows_of(first, count)
        return torch.from_numpy(np.stack([self._window(int(index)) for index in indices]).astype(np.int64))

    def batches(self, first: int, plan: BatchPlan) -> list[Batch]:
        """A rank's micro-batches of one step, beginning at sample `first`; labels are the tokens that come next."""
        tokens = self.samples(first, plan.per_rank)
        return [
            {"input_ids": micro[:, :-1], "labels": micro[:, 1:]}
            for micro in torch.split(tokens, plan.micro_batch)
        ]

    def windows_of(self, first: int, count: int) -> Indices:
        """Which windows these samples are."""
        samples = np.arange(first, first + count, dtype=np.uint64)
        epochs, within = np.divmod(samples, np.uint64(self.num_windows))
        windows = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            permutation = Permutation(self.num_windows, f"{self._seed}/{epoch}")
            windows[chosen] = permutation(within[chosen])
        return windows

    def _window(self, index: int) -> npt.NDArray[np.unsignedinteger]:
        begin = index * self._seq_len
        end = begin + self._seq_len + 1
        pieces = []
        shard = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while begin < end:
            start = int(self._starts[shard])
            piece = self._shards[shard][begin - start : end - start]
            pieces.append(piece)
            begin += len(piece)
            shard += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def read_manifest(dataset_uri: str) -> DatasetManifest:
    """The dataset's manifest. Raises DatasetError when there is none or it is not one."""
    if not dataset_uri:
        raise DatasetError("data.uri is empty: give --data.uri=gs://BUCKET/DIR, what stage_data returned.")
    uri = join(dataset_uri, MANIFEST_NAME)
    try:
        return DatasetManifest.from_json(storage_for(uri).read(uri))
    except ObjectNotFoundError as exc:
        raise DatasetError(
            f"{dataset_uri} is not a dataset: it has no {MANIFEST_NAME}, which is written last. "
            "Give data.uri the directory that stage_data returned."
        ) from exc
    except ContractError as exc:
        raise DatasetError(f"{uri}: {exc}") from exc


def open_train_split(
    dataset_uri: str, manifest: DatasetManifest, config: JobConfig, world: World
) -> TokenWindows:
    """The train shards, verified once per node and mapped into memory. Collective.

    A dataset on this machine is mapped where it lies; another is downloaded by local rank 0, once per node and over all
    attempts. Raises DatasetError for a shard that is not what the manifest says, BatchError when they are too few.
    """
    on_disk = dataset_uri.startswith("file://")
    directory = path_of(dataset_uri) if on_disk else _cache_directory(manifest)
    world.once_per_node(
        lambda: prepare_shards(manifest, directory, dataset_uri=dataset_uri, may_download=not on_disk)
    )
    paths = [directory / shard.name for shard in manifest.train]
    dtype = np.dtype(manifest.token_type).newbyteorder("<")
    shards = [np.memmap(path, dtype=dtype, mode="r") for path in paths if path.stat().st_size]
    windows = TokenWindows(shards, seq_len=config.data.seq_len, seed=config.seed)
    windows.require_batch(config.global_batch)
    return windows


def prepare_shards(
    manifest: DatasetManifest, directory: Path, *, dataset_uri: str, may_download: bool
) -> None:
    """See to it that every train shard lies in `directory` as the manifest says. Blocks while it downloads.

    With `may_download`, what is missing or damaged there is fetched from the dataset. Raises DatasetError.
    """
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        futures = [
            pool.submit(
                _prepare_shard, shard, directory / shard.name, join(dataset_uri, shard.name), may_download
            )
            for shard in manifest.train
        ]
        for future in futures:
            future.result()


def _mix(values: Indices) -> Indices:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014); unsigned arithmetic wraps."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _cache_directory(manifest: DatasetManifest) -> Path:
    """Named for the content, so a restarted attempt on the same node finds the shards again."""
    digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"penstock-dataset-{digest[:16]}"


def _prepare_shard(shard: DatasetObject, path: Path, uri: str, may_download: bool) -> None:
    found = FileStorage().stat(path.as_uri())
    if may_download and not _is_intact(found, shard):
        _download(uri, path)
        found = FileStorage().stat(path.as_uri())
    if found is None:
        raise DatasetError(
            f"train shard {uri} does not exist, but the manifest names it. Stage the data again."
        )
    if not _is_intact(found, shard):
        raise DatasetError(
            f"train shard {uri} is corrupt: expected {shard.size} bytes with crc32c {shard.crc32c}, "
            f"found {found.size} bytes with crc32c {found.crc32c}. Stage the data again."
        )


def _is_intact(found: ObjectInfo | None, shard: DatasetObject) -> bool:
    return found is not None and (found.size, found.crc32c) == (shard.size, shard.crc32c)


def _download(uri: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replicas that share a machine share the directory too: each fills a file of its own and the last rename stays.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        storage_for(uri).download(uri, Path(directory) / path.name)
        (Path(directory) / path.name).replace(path)
