"""A checkpoint root as anybody sees it: which steps there are, which are whole, and what is left over.

Beside the contract and storage the only part of the trainer that components and pipelines use. Imports no torch.
"""

from __future__ import annotations

from penstock_trainer.checkpoint_root.index import IndexedChunk, IndexedTensor, read_index
from penstock_trainer.checkpoint_root.leftovers import Leftover, find_leftovers, remove_leftovers
from penstock_trainer.checkpoint_root.root import CheckpointRoot, Condition, Finding, StepState
from penstock_trainer.checkpoint_root.verification import verify

__all__ = [
    "CheckpointRoot",
    "Condition",
    "Finding",
    "IndexedChunk",
    "IndexedTensor",
    "Leftover",
    "StepState",
    "find_leftovers",
    "read_index",
    "remove_leftovers",
    "verify",
]
