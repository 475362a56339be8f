"""What is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_trainer.contract.fields import require


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Token shards and how they are cut into sequences; or samples that the user's own function makes."""

    uri: str = ""
    """Directory that holds the dataset's manifest.json, as gs:// or file:// URI. Given at run time."""
    source: str = ""
    """`module:function` instead of token shards. Called with `split` ("train" or "evaluation"), with `uri` where that
    is given, and with `options`; it returns a map-style dataset: `len()`, and by index a dict of tensors, arrays or
    numbers with `labels` among them, the others being the model's input by keyword. A sample must depend on its index
    alone, or a resumed run is not the same."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the user's function."""
    seq_len: int = 256
    """Tokens per sequence that the model sees at once. Of token shards."""
    prefetch_steps: int = 2
    """Steps whose batches are prepared while the model computes; 0: none, in the step itself."""

    def __post_init__(self) -> None:
        require(self.seq_len > 1, "data.seq_len", self.seq_len, "at least 2 tokens")
        require(self.prefetch_steps >= 0, "data.prefetch_steps", self.prefetch_steps, "0 or more")
        module, _, function = self.source.partition(":")
        require(
            not self.source or bool(module and function),
            "data.source",
            self.source,
            "of the form module:function",
        )
        require(
            bool(self.source) or not self.options,
            "data.options",
            dict(self.options),
            "empty without data.source = 'module:function'",
        )
