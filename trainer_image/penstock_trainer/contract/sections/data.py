"""What is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_trainer.contract.fields import require


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the token shards are and how they are cut into sequences."""

    uri: str = ""
    """Directory that holds the dataset's manifest.json, as gs:// or file:// URI. Given at run time."""
    seq_len: int = 256
    """Tokens per sequence that the model sees at once."""
    prefetch_steps: int = 2
    """Steps whose batches are prepared while the model computes; 0: none, in the step itself."""

    def __post_init__(self) -> None:
        require(self.seq_len > 1, "data.seq_len", self.seq_len, "at least 2 tokens")
        require(self.prefetch_steps >= 0, "data.prefetch_steps", self.prefetch_steps, "0 or more")
