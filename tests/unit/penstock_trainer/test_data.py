"""Windows, their order, and what makes a dataset unusable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.order import Permutation
from penstock_trainer.data.shards import open_train_split, prepare_shards, read_manifest
from penstock_trainer.data.token_windows import TokenWindows
from penstock_trainer.errors import BatchError, DatasetError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


def windows(num_tokens: int, *, seq_len: int = 4, cuts: tuple[int, ...] = (), seed: int = 0) -> TokenWindows:
    shards = np.split(np.arange(num_tokens, dtype=np.uint16), cuts)
    return TokenWindows(shards, seq_len=seq_len, seed=seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000, 4097, 65535, 65537])
def test_a_permutation_is_a_bijection(size: int) -> None:
    images = Permutation(size, "key")(np.arange(size, dtype=np.uint64))
    assert sorted(images.tolist()) == list(range(size))


def test_a_permutation_depends_on_its_key_and_scatters() -> None:
    indices = np.arange(10_000, dtype=np.uint64)
    one, other = Permutation(10_000, "0/0")(indices), Permutation(10_000, "0/1")(indices)
    assert (one == other).sum() < 20  # chance alone gives one
    # Uncorrelated with the index: the coefficient of a random permutation of this size has a deviation of 0.01.
    assert abs(np.corrcoef(indices.astype(float), one.astype(float))[0, 1]) < 0.05
    # And neighbours do not stay neighbours.
    assert (np.abs(np.diff(one.astype(np.int64))) == 1).sum() < 20


def test_a_permutation_of_a_huge_range_costs_no_memory() -> None:
    images = Permutation(10**15, "key")(np.arange(1000, dtype=np.uint64))
    assert len(set(images.tolist())) == 1000
    assert images.max() < 10**15


def test_windows_cover_the_stream_with_one_token_of_overlap_and_cross_shards() -> None:
    stream = windows(41, cuts=(3, 3, 30))
    assert stream.num_windows == 10
    order = stream.windows_of(0, 10)
    rows = stream.samples(0, 10)[np.argsort(order)]
    assert rows.tolist() == [list(range(4 * index, 4 * index + 5)) for index in range(10)]
    assert windows(40).num_windows == 9
    assert rows.dtype == torch.int64


def test_each_epoch_visits_each_window_once_in_an_order_of_its_own() -> None:
    stream = windows(41)
    epochs = [stream.windows_of(10 * epoch, 10).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.windows_of(7, 6).tolist() == epochs[0][7:] + epochs[1][:3]
    assert windows(41, seed=1).windows_of(0, 10).tolist() != epochs[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_ranks_parts_make_up_the_same_global_batch_at_any_world_size(world_size: int) -> None:
    stream = windows(1000)
    plan = BatchPlan.of(replace(tiny_config(""), global_batch=12), world_size)
    parts = [stream.samples(36 + rank * plan.per_rank, plan.per_rank) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), stream.samples(36, 12))


@pytest.mark.parametrize(
    ("global_batch", "world_size", "max_micro_batch", "expected"),
    [(16, 1, 8, (16, 8, 2)), (12, 2, 4, (6, 3, 2)), (14, 2, 4, (7, 1, 7)), (8, 8, 4, (1, 1, 1))],
)
def test_a_rank_takes_the_largest_equal_micro_batch(
    global_batch: int, world_size: int, max_micro_batch: int, expected: tuple[int, int, int]
) -> None:
    config = tiny_config("", global_batch=global_batch, max_micro_batch=max_micro_batch)
    plan = BatchPlan.of(config, world_size)
    assert (plan.per_rank, plan.micro_batch, plan.accumulation) == expected


def test_a_batch_that_does_not_divide_names_what_does() -> None:
    with pytest.raises(BatchError) as caught:
        BatchPlan.of(tiny_config("", global_batch=12), 5)
    assert str(caught.value) == (
        "global_batch = 12 does not divide among 5 ranks. "
        "Give 10 or 15, or use a number of ranks of [1, 2, 3, 4, 6, 12]."
    )


def test_too_few_tokens_for_a_batch_is_an_error_with_the_numbers(tmp_path: Path, world: World) -> None:
    uri = build_dataset(tmp_path, max_tokens=384)
    with pytest.raises(
        BatchError,
        match=r"its 384 tokens make 11 sequences of 32, .* takes 12\. It needs at least 385 tokens",
    ):
        open_train_split(uri, read_manifest(uri), tiny_config(uri), world)
    uri = build_dataset(tmp_path, max_tokens=385)
    assert open_train_split(uri, read_manifest(uri), tiny_config(uri), world).num_windows == 12


def test_a_corrupt_shard_is_named_with_what_was_expected_and_found(tmp_path: Path, world: World) -> None:
    uri = build_dataset(tmp_path)
    manifest = read_manifest(uri)
    shard = tmp_path / "train/shard-00001.tokens"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    entry = manifest.train[1]
    with pytest.raises(DatasetError) as caught:
        open_train_split(uri, manifest, tiny_config(uri), world)
    assert f"train shard {uri}/{entry.name} is corrupt" in str(caught.value)
    assert f"expected {entry.size} bytes with crc32c {entry.crc32c}, found {entry.size} bytes" in str(
        caught.value
    )
    shard.unlink()
    with pytest.raises(DatasetError, match="does not exist, but the manifest names it"):
        open_train_split(uri, manifest, tiny_config(uri), world)


def test_a_remote_shard_is_fetched_once_and_again_when_the_copy_is_damaged(tmp_path: Path) -> None:
    uri, cache = build_dataset(tmp_path / "dataset"), tmp_path / "cache"
    manifest = read_manifest(uri)
    copies = [cache / shard.name for shard in manifest.train]
    prepare_shards(manifest, cache, dataset_uri=uri, may_download=True)
    assert [copy.read_bytes() for copy in copies] == [
        (tmp_path / "dataset" / shard.name).read_bytes() for shard in manifest.train
    ]
    assert sorted(copies[0].parent.iterdir()) == copies

    fetched_at = [copy.stat().st_mtime_ns for copy in copies]
    copies[1].write_bytes(b"cut off")
    prepare_shards(manifest, cache, dataset_uri=uri, may_download=True)
    kept = [copy.stat().st_mtime_ns == before for copy, before in zip(copies, fetched_at, strict=True)]
    assert kept == [True, False, True]

    copies[2].unlink()
    (tmp_path / "dataset" / manifest.train[2].name).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"shard-00002\.tokens is corrupt: .* found 0 bytes"):
        prepare_shards(manifest, cache, dataset_uri=uri, may_download=True)


def test_a_directory_without_a_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    uri = build_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 99}))
    with pytest.raises(DatasetError, match=r"manifest\.json"):
        read_manifest(uri)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DatasetError, match="is not a dataset"):
        read_manifest(uri)
