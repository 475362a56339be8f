"""The user's own dataset: what it becomes, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from penstock_trainer.contract.config import DataConfig
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.user_dataset import UserDataset, UserSamples
from penstock_trainer.errors import BatchError, DatasetError, UserFunctionError

HERE = "unit.penstock_trainer.user_data"


def dataset(name: str, **more: object) -> UserDataset:
    return UserDataset(DataConfig(source=f"{HERE}:{name}", **more), "train")  # type: ignore[arg-type]


def test_numbers_and_arrays_are_stacked_and_floats_are_fp32() -> None:
    batch = dataset("mixed").collate([3, 0])
    assert batch["x"].tolist() == [[3.0] * 3, [0.0] * 3]
    assert batch["x"].dtype == torch.float32
    assert batch["position"].tolist() == [3, 0]
    assert batch["labels"].dtype == torch.int64


def test_the_split_and_the_uri_are_handed_to_the_function() -> None:
    config = DataConfig(source=f"{HERE}:mixed", uri="gs://bucket/images")
    assert UserDataset(config, "evaluation").collate([1])["x"][0, 0] == 101
    with pytest.raises(UserFunctionError, match=r"ragged\(.*uri"):
        UserDataset(DataConfig(source=f"{HERE}:ragged", uri="gs://bucket/images"), "train")


def test_ranks_share_a_global_batch_and_count_only_targets() -> None:
    samples = UserSamples(dataset("mixed"), global_batch=8, seed=0)
    plan = BatchPlan(per_rank=4, micro_batch=2, accumulation=2)
    ranks = [samples.step(first, plan) for first in (0, 4)]
    seen = torch.cat([batch["position"] for rank in ranks for batch in rank.batches])
    assert sorted(seen.tolist()) == list(range(8))
    assert [len(rank.batches) for rank in ranks] == [2, 2]
    assert sum(rank.num_targets for rank in ranks) == 4


@pytest.mark.parametrize(
    ("name", "indices", "told"),
    [
        ("unlabelled", [0], "has the keys ['target', 'x']; it must be a dict with 'labels'"),
        ("tuples", [0], "has tuple; it must be a dict"),
        ("ragged", [0, 1], "samples [0, 1] of unit.penstock_trainer.user_data:ragged do not stack"),
        ("failing", [5], "sample 5 of unit.penstock_trainer.user_data:failing: OSError: disk gone"),
        ("infinite", [4, 5], "'x' is not finite in samples [4, 5]"),
        ("stream", [], "no map-style dataset: it needs __len__ and __getitem__"),
        ("empty", [], "has no sample in split 'train'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(name: str, indices: list[int], told: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(told)):
        dataset(name).collate(indices)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("no_such_module:data", "no_such_module cannot be imported"),
        (f"{HERE}:no_such", "has no function no_such"),
        (f"{HERE}:9lives", "must be module:function"),
    ],
)
def test_a_function_that_is_not_there_is_named(source: str, told: str) -> None:
    with pytest.raises(UserFunctionError, match=told):
        UserDataset(DataConfig(source=source), "train")


def test_an_epoch_needs_a_full_batch() -> None:
    with pytest.raises(BatchError, match="it has 8 samples, and one global batch takes 9"):
        UserSamples(dataset("mixed"), global_batch=9, seed=0)
