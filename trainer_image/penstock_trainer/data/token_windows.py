"""Token shards as one stream of windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.order import Indices, sample_order
from penstock_trainer.data.samples import LocalStep
from penstock_trainer.errors import BatchError


class TokenWindows:
    """The train split as one token stream, cut into windows of seq_len + 1 tokens at a stride of seq_len.

    Each token but the first is the target of exactly one position of the split; what does not fill a last window is
    left out.
    """

    def __init__(self, shards: Sequence[npt.NDArray[np.unsignedinteger]], *, seq_len: int, seed: int) -> None:
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self._seq_len = seq_len
        self.targets_per_sample: int | None = seq_len
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

    def step(self, first: int, plan: BatchPlan) -> LocalStep:
        """See Samples.step; labels are the tokens that come next."""
        tokens = self.samples(first, plan.per_rank)
        batches = [
            {"input_ids": micro[:, :-1], "labels": micro[:, 1:]}
            for micro in torch.split(tokens, plan.micro_batch)
        ]
        return LocalStep(batches, num_targets=plan.per_rank * self._seq_len)

    def windows_of(self, first: int, count: int) -> Indices:
        """Which windows these samples are."""
        return sample_order(first, count, size=self.num_windows, seed=self._seed)

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
