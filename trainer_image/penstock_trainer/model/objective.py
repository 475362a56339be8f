"""A model with its loss: the module that engines spread over the ranks.

A batch is a dict of tensors with the samples in dim 0. `labels` are class ids (for text: of the *next* token, already
shifted), IGNORED where nothing is to be predicted; everything else in it is the model's input by keyword.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from penstock_trainer.model.linear_loss import linear_cross_entropy

Batch = dict[str, Tensor]
IGNORED = -100
"""A label that is no target."""


@runtime_checkable
class SplitsHead(Protocol):
    """A model whose head can be left to a loss that never holds all logits."""

    def hidden(self, input_ids: Tensor) -> Tensor:
        """What the head takes: [B, T, D]."""

    def head_weight(self) -> Tensor:
        """The head: [V, D]."""


class Objective(nn.Module):
    """Loss of a model on a batch.

    A sum and not a mean: micro-batches and ranks may hold different numbers of targets, and only their sum over all of
    them can be divided right. The model returns logits [..., V], or an object that has them as `logits`.
    """

    def __init__(self, model: nn.Module, *, chunk_tokens: int = 0) -> None:
        super().__init__()
        if chunk_tokens and not isinstance(model, SplitsHead):
            raise TypeError(
                f"{type(model).__name__} has no head apart from its body: its logits cannot be chunked"
            )
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.input_dtype: torch.dtype | None = None
        """To which floating point inputs are cast; None: they are left alone."""

    def forward(self, batch: Batch) -> Tensor:
        """[1]: the sum of the targets' losses in nats, fp32. In eval mode [2]: and the number of them predicted."""
        inputs = {name: self._cast(tensor) for name, tensor in batch.items() if name != "labels"}
        labels = batch["labels"]
        if self.chunk_tokens:
            model: Any = self.model
            hidden, weight = model.hidden(**inputs).flatten(0, -2), model.head_weight()
            if not self.training:
                return self._scored_in_chunks(hidden, weight, labels.flatten())
            loss = linear_cross_entropy(
                hidden, weight, labels.flatten(), ignore_index=IGNORED, chunk=self.chunk_tokens
            )
            return torch.stack((loss,))
        output = self.model(**inputs)
        logits = cast("Tensor", getattr(output, "logits", output)).flatten(0, -2)
        loss = cross_entropy(logits.float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.training:
            return torch.stack((loss,))  # no view: FSDP2 could not hang its hook on one
        correct = (logits.argmax(-1) == labels.flatten()).sum()
        return torch.stack((loss, correct.to(loss.dtype)))

    def _scored_in_chunks(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """[2] as in eval mode, from hidden [N, D], head [V, D] and labels [N], a chunk's logits at a time."""
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        size = self.chunk_tokens
        for some_hidden, some_labels in zip(
            torch.split(hidden, size), torch.split(labels, size), strict=True
        ):
            logits = linear(some_hidden, weight)
            loss = cross_entropy(logits.float(), some_labels, ignore_index=IGNORED, reduction="sum")
            sums += torch.stack((loss, (logits.argmax(-1) == some_labels).sum().to(loss.dtype)))
        return sums

    def _cast(self, tensor: Tensor) -> Tensor:
        is_cast = self.input_dtype is not None and tensor.is_floating_point()
        return tensor.to(self.input_dtype) if is_cast else tensor
