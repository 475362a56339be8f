"""What a user's module may hold: a model's function that works, and some that do not."""

from __future__ import annotations

import torch
from torch import nn

weights = torch.ones(3)


def linear(*, width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)


def nothing() -> None:
    return None


def half() -> nn.Module:
    return nn.Linear(3, 2).bfloat16()


class Bigram(nn.Module):
    """Logits of the next token from the token alone. Its weight is used twice, as a tied head is."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.first = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size, bias=False)
        self.head.weight = self.first.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.first(input_ids))
        return logits


def bigram(*, vocab_size: int) -> nn.Module:
    return Bigram(vocab_size)
