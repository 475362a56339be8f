"""Bytes that torch really holds and moves: storages of tensors while they live, and collectives as they are called."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
"""torch.distributed's dispatched operations (torch/csrc/distributed/c10d/Ops.cpp) by the name of the collective."""


class Counted(TorchDispatchMode):
    """Counts while it is entered. What existed before is not seen.

    A storage counts from the operation that made it until it is freed, with the size that it has (FSDP2 empties storages
    by resizing them). What a kernel needs only within itself is not seen, and what gloo's threads make is not either.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0
        self.collectives: list[tuple[str, int, int]] = []
        """(operation, ranks of the group, bytes of the whole tensor), in order."""
        self.peak_of: list[tuple[int, str]] = []
        self.explain = False

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum(storage.nbytes() for storage in self._alive)

    def begin(self) -> None:
        """Count peak and collectives anew."""
        self.peak = self.now
        self.collectives.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor does its work on plain tensors, which come here in turn
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # shapes only
        if func.namespace == "c10d":
            self._collective(func.__name__.partition(".")[0], args)
        if func.namespace == "_c10d_functional":
            self._functional(func.__name__.partition(".")[0], args)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if self.explain and storage not in self._alive:
                    import traceback

                    storage.told = f"{func} {tuple(leaf.shape)} {leaf.dtype} " + " < ".join(
                        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}"
                        for f in reversed(traceback.extract_stack(limit=9)[:-1])
                    )
                self._alive.add(storage)
        now = self.now
        if now > self.peak:
            self.peak = now
            if self.explain:
                self.peak_of = self.largest()
                self.peak_op = str(func)
        return out

    def largest(self) -> list[tuple[int, str]]:
        return sorted(((s.nbytes(), getattr(s, "told", "?")) for s in self._alive), reverse=True)

    def _functional(self, name: str, args: Sequence[Any]) -> None:
        """Of DTensor: the group is the last argument, by name."""
        if not name.startswith(("all_", "reduce_", "broadcast")):
            return
        ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
        (tensor, *_) = args
        self.collectives.append((name.rstrip("_"), ranks, tensor.numel() * tensor.element_size()))

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        if name not in _OPERATIONS:
            if name not in ("barrier", "monitored_barrier_"):
                self.collectives.append((name, 0, 0))
            return
        group = next(
            one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())
        )
        ranks = dist.ProcessGroup.unbox(group).size()
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        self.collectives.append((_OPERATIONS[name], ranks, max(sizes)))
