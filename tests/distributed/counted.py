"""Bytes that torch really holds and moves: storages of tensors while they live, and collectives as they are called."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GLOO_SECONDS = 0.01
_OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Dispatched operations of torch.ops.c10d and, for DTensors, torch.ops._c10d_functional, by the collective's name."""


class Counted(TorchDispatchMode):
    """Counts while it is entered; what existed before is not seen.

    A storage counts from the operation that made it until it is freed, with the size that it has then (FSDP2 empties
    storages by resizing them). What a kernel needs only within itself is not seen, nor what gloo's threads make.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.collectives: list[tuple[str, int, int]] = []
        """(operation, ranks of the group, bytes of the whole tensor), in order."""
        self._is_counting = False
        self._unsettled = 0
        """New maxima after a collective at which its tensors may still be held."""

    @property
    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for key, weak in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within it peak and collectives are counted, anew."""
        self.peak = self.now
        self.collectives.clear()
        self._is_counting = True
        gc.freeze()  # so that collecting often costs little
        try:
            yield
        finally:
            gc.unfreeze()
            self._is_counting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it does its work on plain tensors, which come here in turn
        if func.namespace in ("c10d", "_c10d_functional") and self._is_counting:
            self._collective(func.__name__.partition(".")[0], args)
        out = func(*args, **(kwargs or {}))
        # Only a storage that is new, or that FSDP2 has just filled again, can make the fullest moment.
        if (self._see(out) or func.namespace == "fsdp") and self._is_counting and self.now > self.peak:
            self._settle()
            self.peak = max(self.peak, self.now)
        return out

    def _settle(self) -> None:
        """Let go what is not needed any more: what only reference cycles keep, and the tensors of a collective that has
        ended, which gloo's thread holds for a moment longer."""
        gc.collect()
        if self._unsettled:
            self._unsettled -= 1
            time.sleep(_GLOO_SECONDS)

    def _see(self, out: Any) -> bool:
        """Whether an operation has made a storage."""
        is_new = False
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                is_new = is_new or storage._cdata not in self._alive
                self._alive.setdefault(storage._cdata, StorageWeakRef(storage))
        return is_new

    def _collective(self, name: str, args: Sequence[Any]) -> None:
        if name not in _OPERATIONS:
            assert name in ("wait_tensor", "barrier", "_wrap_tensor_autograd"), (
                f"a collective unknown here: {name}"
            )
            return
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self._unsettled = 3
        self.collectives.append((_OPERATIONS[name], _group(args).size(), max(sizes)))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """A collective's: an argument itself, or by the name that comes last."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one)
    return dist.distributed_c10d._resolve_process_group(args[-1])
