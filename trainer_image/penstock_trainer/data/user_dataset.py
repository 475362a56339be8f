"""The user's own dataset as samples: a function that returns a map-style dataset, see DataConfig.source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch.utils.data import default_collate

from penstock_trainer.contract.config import DataConfig
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.order import sample_order
from penstock_trainer.data.samples import LocalStep
from penstock_trainer.errors import BatchError, DatasetError
from penstock_trainer.model.objective import IGNORED, Batch
from penstock_trainer.user_function import call_user_function

Split = Literal["train", "evaluation"]


class UserDataset:
    """One split of the user's dataset, checked as far as one sample shows it."""

    def __init__(self, config: DataConfig, split: Split) -> None:
        """Raises UserFunctionError when the function cannot be called, DatasetError for what is no dataset of it."""
        self._source = config.source
        arguments = {"split": split, **({"uri": config.uri} if config.uri else {}), **config.options}
        self._dataset: Any = call_user_function(config.source, arguments, section="data")
        if not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise DatasetError(
                f"{config.source} returned {type(self._dataset).__name__} for split {split!r}, which is no map-style "
                "dataset: it needs __len__ and __getitem__."
            )
        if not len(self):
            raise DatasetError(f"{config.source} has no sample in split {split!r}.")
        self.collate([0])

    def __len__(self) -> int:
        return len(self._dataset)

    def collate(self, indices: Sequence[int]) -> Batch:
        """These samples stacked in dim 0; floating point values become fp32. Raises DatasetError."""
        samples = [self._sample(index) for index in indices]
        try:
            batch = cast("Batch", default_collate(samples))
        except (RuntimeError, TypeError, KeyError) as exc:
            raise DatasetError(
                f"samples {list(indices)} of {self._source} do not stack: {exc}. Each needs the same keys, and tensors, "
                "arrays or numbers of the same shape; pad or crop them."
            ) from exc
        for name, value in batch.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise DatasetError(
                    f"{name!r} is not finite in samples {list(indices)} of {self._source}: it has NaN or infinite values."
                )
        return {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}

    def _sample(self, index: int) -> Mapping[str, Any]:
        try:
            sample = self._dataset[index]
        except Exception as exc:
            raise DatasetError(f"sample {index} of {self._source}: {type(exc).__name__}: {exc}") from exc
        if not isinstance(sample, Mapping) or "labels" not in sample:
            found = f"the keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
            raise DatasetError(
                f"sample {index} of {self._source} has {found}; it must be a dict with 'labels' among its keys."
            )
        return sample


class UserSamples:
    """The train split; see Samples. Each sample may have any number of targets."""

    targets_per_sample: int | None = None

    def __init__(self, dataset: UserDataset, *, global_batch: int, seed: int) -> None:
        """Raises BatchError when an epoch has no full batch."""
        if len(dataset) < global_batch:
            raise BatchError(
                f"the train split is too small: it has {len(dataset)} samples, and one global batch takes "
                f"{global_batch}. Lower global_batch or give more data."
            )
        self._dataset = dataset
        self._seed = seed

    def step(self, first: int, plan: BatchPlan) -> LocalStep:
        """See Samples.step."""
        indices = sample_order(first, plan.per_rank, size=len(self._dataset), seed=self._seed).tolist()
        batches = [
            self._dataset.collate(indices[start : start + plan.micro_batch])
            for start in range(0, plan.per_rank, plan.micro_batch)
        ]
        targets = sum(int(torch.count_nonzero(batch["labels"] != IGNORED)) for batch in batches)
        return LocalStep(batches, num_targets=targets)
