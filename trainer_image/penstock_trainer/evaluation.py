"""How good the model is while it trains: a fixed part of the held-out split, scored by all ranks together.

A batch holds the same samples whatever the number of ranks, and sums over batches are float64, so scores hardly depend
on it. All ranks run the same number of forward passes: sharded engines gather parameters in each.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from penstock_trainer.contract.checkpoint import Best
from penstock_trainer.contract.config import EvaluationConfig, JobConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.data.held_out import (
    Window,
    batch_of,
    by_length,
    held_out_documents,
    held_out_windows,
    read_tokenizer,
)
from penstock_trainer.data.user_dataset import UserDataset
from penstock_trainer.engines.engine import Engine
from penstock_trainer.errors import DatasetError, DivergedError
from penstock_trainer.model.objective import IGNORED, Batch
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What an evaluation found, over all ranks."""

    loss: float
    """Mean over the targets, in nats."""
    accuracy: float
    """Share of the targets that the model predicts."""
    targets: int
    seconds: float


class HeldOut(Protocol):
    """The samples that are scored. A Protocol because text is cut into them, and the user's dataset is made of them."""

    def __len__(self) -> int:
        """Samples."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples, on CPU."""


class HeldOutText:
    """Windows of documents; see penstock_trainer.data.held_out."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = by_length(windows)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        """See HeldOut.batch."""
        return batch_of([self._windows[index] for index in indices])


class HeldOutSamples:
    """The first samples of the user's own evaluation split."""

    def __init__(self, dataset: UserDataset, *, max_samples: int) -> None:
        self._dataset = dataset
        self._size = min(len(dataset), max_samples) if max_samples else len(dataset)

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int]) -> Batch:
        """See HeldOut.batch. Raises DatasetError for a sample that cannot be used."""
        return self._dataset.collate(indices)


class Evaluation:
    """Scores an engine's model, as often as it is asked to, on the same samples."""

    def __init__(self, engine: Engine, held_out: HeldOut, *, batch_size: int, world: World) -> None:
        """`batch_size`: samples that one rank takes through the model at once."""
        self._engine = engine
        self._held_out = held_out
        self._world = world
        size = len(held_out)
        self._batches = [range(start, min(start + batch_size, size)) for start in range(0, size, batch_size)]
        logger.info("evaluation: samples=%d batches=%d", size, len(self._batches))

    def run(self, on_batch: Callable[[], None] = lambda: None) -> Scores:
        """Collective; waits for the device. `on_batch` is called before each batch.

        Raises DatasetError when no sample has a target, and for one that cannot be used; DivergedError when the loss is
        no finite number.
        """
        began = time.perf_counter()
        # On the device, so that no batch waits for the one before it to have been summed.
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        targets = 0
        for batch in self._of_this_rank():
            on_batch()
            targets += int(torch.count_nonzero(batch["labels"] != IGNORED))
            sums += self._engine.evaluate(self._on_device(batch)).double()
        told = torch.tensor([*sums.tolist(), targets], dtype=torch.float64)
        dist.all_reduce(told, group=self._world.control)
        return _scores(*told.tolist(), seconds=time.perf_counter() - began)

    def _of_this_rank(self) -> Iterator[Batch]:
        """Every world_size-th batch, and where the last round has none for this rank, one without targets."""
        rank, world_size = self._world.env.rank, self._world.env.world_size
        for first in range(0, len(self._batches), world_size):
            if first + rank < len(self._batches):
                yield self._held_out.batch(self._batches[first + rank])
            else:
                batch = self._held_out.batch(self._batches[first])
                yield {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}

    def _on_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._world.device) for name, tensor in batch.items()}


def open_evaluation(
    config: JobConfig, manifest: DatasetManifest | None, engine: Engine, world: World
) -> Evaluation:
    """The evaluation that the config asks for; `manifest` is that of the token shards, None for the user's own data.

    Collective. Blocks on storage. Raises DatasetError for a held-out split that is empty or not what the manifest says,
    UserFunctionError for a data.source that cannot be called, and StorageError.
    """
    most = config.evaluation.max_samples
    if manifest is None:
        held_out: HeldOut = HeldOutSamples(UserDataset(config.data, "evaluation"), max_samples=most)
    else:
        held_out = HeldOutText(world.from_primary(lambda: _windows(config, manifest)))
    # Not the plan's micro-batch, which follows from the number of ranks.
    return Evaluation(engine, held_out, batch_size=config.max_micro_batch, world=world)


def improves(value: float, best: Best | None, config: EvaluationConfig) -> bool:
    """Whether a value of the config's metric is better than the best so far, and by enough."""
    if best is None:
        return True
    gain = best.value - value if config.metric == "loss" else value - best.value
    return gain > config.min_improvement


def _windows(config: JobConfig, manifest: DatasetManifest) -> list[Window]:
    uri = config.data.uri
    tokenizer = Tokenizer.from_str(read_tokenizer(uri, manifest).decode())
    windows = held_out_windows(
        tokenizer,
        held_out_documents(uri, manifest),
        eos_id=manifest.tokenizer.eos_id,
        seq_len=config.data.seq_len,
    )
    chosen = list(itertools.islice(windows, config.evaluation.max_samples or None))
    if not chosen:
        raise DatasetError(
            f"{uri} has no held-out text to evaluate on. Stage it with an evaluation share, or set "
            "evaluation.interval to 0."
        )
    return chosen


def _scores(loss: float, predicted: float, targets: float, *, seconds: float) -> Scores:
    if not targets:
        raise DatasetError(
            "the held-out samples have no target: each of their labels is ignored. Raise evaluation.max_samples, or "
            "give samples with labels."
        )
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss on the held-out samples is {loss}: the model says that a target is impossible, or its logits "
            "overflow. In bf16 or fp16 try engine.precision = fp32."
        )
    return Scores(loss=loss / targets, accuracy=predicted / targets, targets=int(targets), seconds=seconds)
