"""Batches of the steps to come, prepared by a thread while the model computes.

Which samples a step takes follows from the samples seen, so what is prepared ahead is no state: it is dropped and made
again where a run continues elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from penstock_trainer.data.samples import LocalStep

Load = Callable[[int], LocalStep]
"""A step on CPU by its first sample."""


class Loader:
    """One rank's steps in order. A context manager: its thread ends with it."""

    def __init__(self, load: Load, *, stride: int, ahead: int, device: torch.device) -> None:
        """`stride`: samples from one step's first to the next's. `ahead`: steps that are prepared while one computes."""
        self._load = load
        self._stride = stride
        self._ahead = ahead
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ready: deque[tuple[int, Future[LocalStep]]] = deque()

    def step(self, first: int) -> LocalStep:
        """The step that begins at this sample, on the device.

        Blocks only while they are not ready, and raises what their preparation raised. Any step may be asked for; those
        ahead are of use where each follows the one before.
        """
        while self._ready and self._ready[0][0] != first:
            self._ready.popleft()[1].cancel()
        step = self._ready.popleft()[1].result() if self._ready else self._prepare(first)
        for ahead in range(len(self._ready) + 1, self._ahead + 1):
            at = first + ahead * self._stride
            self._ready.append((at, self._pool.submit(self._prepare, at)))
        return _each(step, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _prepare(self, first: int) -> LocalStep:
        step = self._load(first)
        # Only from pinned memory does a copy run beside the computation.
        return _each(step, Tensor.pin_memory) if self._device.type == "cuda" else step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _each(step: LocalStep, move: Callable[[Tensor], Tensor]) -> LocalStep:
    batches = [{name: move(tensor) for name, tensor in batch.items()} for batch in step.batches]
    return LocalStep(batches, step.num_targets)
