"""Token shards: found, verified and brought to this node."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.dataset import MANIFEST_NAME, DatasetManifest, DatasetObject
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.data.token_windows import TokenWindows
from penstock_trainer.errors import DatasetError
from penstock_trainer.storage import FileStorage, ObjectInfo, ObjectNotFoundError, join, path_of, storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_DOWNLOADS = 8
"""Shards at once: one stream does not fill a node's link."""


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
    shards = [_tokens(path, manifest) for path in paths if path.stat().st_size]
    windows = TokenWindows(shards, seq_len=config.data.seq_len, seed=config.seed)
    windows.require_batch(config.global_batch)
    return windows


def prepare_shards(
    manifest: DatasetManifest, directory: Path, *, dataset_uri: str, may_download: bool
) -> None:
    """See to it that every train shard lies in `directory` as the manifest says. Blocks while it downloads.

    With `may_download`, what is missing or damaged there is fetched from the dataset. Raises DatasetError, also for a
    token that the tokenizer does not have: on the device it would be an illegal memory access, steps later.
    """
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        futures = [
            pool.submit(
                _prepare_shard,
                *(shard, directory / shard.name, join(dataset_uri, shard.name), manifest, may_download),
            )
            for shard in manifest.train
        ]
        for future in futures:
            future.result()


def _cache_directory(manifest: DatasetManifest) -> Path:
    """Named for the content, so a restarted attempt on the same node finds the shards again."""
    digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"penstock-dataset-{digest[:16]}"


def _prepare_shard(
    shard: DatasetObject, path: Path, uri: str, manifest: DatasetManifest, may_download: bool
) -> None:
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
    vocab_size = manifest.tokenizer.vocab_size
    if shard.size and (largest := int(_tokens(path, manifest).max())) >= vocab_size:
        raise DatasetError(
            f"train shard {uri} has a token id outside the vocabulary: {largest}, and the dataset's tokenizer has ids up "
            f"to {vocab_size - 1}. Stage the data again."
        )


def _tokens(path: Path, manifest: DatasetManifest) -> npt.NDArray[np.unsignedinteger]:
    return np.memmap(path, dtype=np.dtype(manifest.token_type).newbyteorder("<"), mode="r")


def _is_intact(found: ObjectInfo | None, shard: DatasetObject) -> bool:
    return found is not None and (found.size, found.crc32c) == (shard.size, shard.crc32c)


def _download(uri: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replicas that share a machine share the directory too: each fills a file of its own and the last rename stays.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        storage_for(uri).download(uri, Path(directory) / path.name)
        (Path(directory) / path.name).replace(path)
