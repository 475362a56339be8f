"""What is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_trainer.contract.fields import require


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Token shards that are cut into sequences, or the samples of a user's map-style dataset."""

    uri: str = ""
    """Directory that holds the dataset's manifest.json, as gs:// or file:// URI. Given at run time."""
    seq_len: int = 256
    """Tokens per sequence that the model sees at once."""
    source: str = ""
    """Empty: the token shards of `uri`. Or `module:function`, called with `split` ("train" or "evaluation") and
    `options`; it returns a dataset with `__len__` and `__getitem__`, whose samples are dicts of tensors of equal shape,
    one of them `labels`. `uri` is handed on to it when it is given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the user's function."""
    prefetch_steps: int = 2
    """Steps whose batches are prepared while the model computes; 0: none, in the step itself."""

    def __post_init__(self) -> None:
        require(self.seq_len > 1, "data.seq_len", self.seq_len, "at least 2 tokens")
        require(self.prefetch_steps >= 0, "data.prefetch_steps", self.prefetch_steps, "0 or more")
        require(
            bool(self.source) or not self.options,
            "data.options",
            dict(self.options),
            "empty without data.source = 'module:function'",
        )
