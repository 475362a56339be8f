"""What torch's own engines add to a step: DDP's buckets, FSDP2's gathered blocks and whole gradients.

After torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp and, in torch/distributed/fsdp/_fully_shard,
_fsdp_param_group.py and _fsdp_collectives.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_components.planning.engine_replay import EngineReplay
from penstock_components.planning.ledger import Ledger
from penstock_components.planning.placement import FP32, Placement, numel_of, shard_numel
from penstock_components.planning.shape import Parameter


class DdpReplay(EngineReplay):
    """Gradients of the last micro-batch go into the buckets, which are held all the time; those of earlier ones add up
    beside them. Under autocast matrices have a narrow copy from forward to backward; where blocks are computed again, to the
    end of forward and anew in the block's backward."""

    def enter(self, block: int) -> None:
        """See EngineReplay.enter."""
        self._ledger.take("gathered", self._copies(self._at.shape.members(block)))

    def begin_backward(self) -> None:
        """See EngineReplay.begin_backward."""
        if self._recomputes:
            self._ledger.give("gathered", self._copies(self._in_blocks()))
        self._ledger.take("gathered", self._copies(self._head()))

    def enter_backward(self, block: int) -> None:
        """See EngineReplay.enter_backward."""
        if self._recomputes:
            self._ledger.take("gathered", self._copies(self._at.shape.members(block)))

    def leave_backward(self, block: int) -> None:
        """See EngineReplay.leave_backward."""
        self._ledger.give("gathered", self._copies(self._at.shape.members(block)))

    def end_backward(self) -> None:
        """See EngineReplay.end_backward."""
        self._ledger.give("gathered", self._copies(self._head()))

    def finish_gradient(self, name: str, item: int) -> None:
        """See EngineReplay.finish_gradient."""
        numel = self._numel(name)
        if not self._is_last:
            self._keep(name, item, FP32)
            return
        if item != FP32:
            self._ledger.pass_through("gradients", FP32 * numel)
        self._ledger.give("gradients", item * numel)
        if name in self._added:
            self._added.discard(name)
            self._ledger.give("gradients", FP32 * numel)

    @property
    def _recomputes(self) -> bool:
        return self._at.engine.activation_checkpointing != "none"

    def _in_blocks(self) -> Iterable[Parameter]:
        return [parameter for parameter in self._at.shape.parameters if parameter.block is not None]

    def _head(self) -> Iterable[Parameter]:
        """The head, where it is a layer; a chunked loss has a copy of its own."""
        matrices = [parameter for parameter in self._at.shape.members(None) if parameter.decays]
        return [] if self._at.engine.loss_chunk_tokens else matrices[-1:]

    def _copies(self, members: Iterable[Parameter]) -> int:
        matrices = numel_of(parameter for parameter in members if parameter.decays)
        return self._at.item_bytes * matrices if self._at.is_narrow else 0


class FsdpReplay(EngineReplay):
    """A block's parameters are whole while it runs, and the next block's on their way; the root's from forward on."""

    def __init__(self, at: Placement, ledger: Ledger, rank: int) -> None:
        super().__init__(at, ledger, rank)
        self._arriving = 0
        """Bytes of the flat tensor of a gather that has not been given up."""
        self._leaving = 0
        """Bytes of the last reduce-scatter's input."""
        self._fresh: dict[int | None, int] = {}
        """Bytes of whole gradients of a block, of this micro-batch."""
        self._accumulated: dict[int | None, int] = {}
        """And of earlier ones."""
        self._reduced = 0
        """Bytes of the rank's parts."""

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """See EngineReplay.begin."""
        super().begin(is_first=is_first, is_last=is_last)
        self._gather(None)

    def enter(self, block: int) -> None:
        """See EngineReplay.enter."""
        self._gather(block)

    def leave(self, block: int) -> None:
        """See EngineReplay.leave."""
        if self._at.engine.reshard_after_forward:
            self._ledger.give("gathered", self._whole(block))

    def begin_backward(self) -> None:
        """See EngineReplay.begin_backward."""
        self._ledger.give("communication", self._arriving)
        self._arriving = 0
        self._prefetch(self._at.shape.num_blocks - 1)

    def enter_backward(self, block: int) -> None:
        """See EngineReplay.enter_backward."""
        if not self._at.engine.reshard_after_forward:
            return
        self._ledger.take("gathered", self._whole(block))
        self._ledger.give("communication", self._arriving)
        self._arriving = 0
        self._prefetch(block - 1)

    def leave_backward(self, block: int) -> None:
        """See EngineReplay.leave_backward."""
        self._reduce(block)

    def finish_gradient(self, name: str, item: int) -> None:
        """See EngineReplay.finish_gradient. In fp32 autograd adds to the gradient of earlier micro-batches."""
        size, block = item * self._numel(name), self._named[name].block
        if block in self._accumulated and not self._at.is_narrow:
            self._ledger.give("gradients", size)
            return
        self._fresh[block] = self._fresh.get(block, 0) + size

    def end_backward(self) -> None:
        """See EngineReplay.end_backward."""
        self._reduce(None)
        self._ledger.give("communication", self._leaving)
        self._leaving = 0

    def step(self) -> None:
        """See EngineReplay.step."""
        self._ledger.give("gradients", self._reduced)
        self._reduced = 0

    def _whole(self, block: int | None) -> int:
        return self._at.item_bytes * self._at.shard_size * self._shards(block, trained=False)

    def _shards(self, block: int | None, *, trained: bool) -> int:
        members = self._at.shape.members(block)
        return sum(shard_numel(p, self._at.shard_size) for p in members if p.is_trained or not trained)

    def _gather(self, block: int | None) -> None:
        whole = self._whole(block)
        if self._at.shard_size > 1:
            self._ledger.take("communication", whole)
            self._copy_shard(whole)
        self._ledger.give("communication", self._arriving)
        self._arriving = whole if self._at.shard_size > 1 else 0
        self._ledger.take("gathered", whole)

    def _copy_shard(self, whole: int) -> None:
        """A rank's own part is cast, or comes from the host, before it goes into the flat tensor."""
        if self._at.is_narrow or (self._at.engine.cpu_offload and self._at.device == "cuda"):
            self._ledger.pass_through("communication", whole // self._at.shard_size)

    def _prefetch(self, block: int) -> None:
        if block >= 0 and self._at.engine.reshard_after_forward and self._at.shard_size > 1:
            self._arriving = self._whole(block)
            self._ledger.take("communication", self._arriving)
            self._copy_shard(self._arriving)

    def _reduce(self, block: int | None) -> None:
        """Whole gradients go into one tensor, of which each rank gets its part."""
        self._ledger.give("gathered", self._whole(block))
        if not self._is_last:
            self._accumulate(block)
            return
        self._ledger.give("communication", self._leaving)
        shards = self._shards(block, trained=True)
        self._leaving = self._at.reduce_bytes * self._at.shard_size * shards
        self._ledger.take("communication", self._leaving)
        self._ledger.give("gradients", self._fresh.pop(block, 0) + self._accumulated.pop(block, 0))
        self._ledger.take("gradients", self._at.reduce_bytes * shards)
        if self._at.reduce_bytes != FP32:
            self._ledger.take("gradients", FP32 * shards)
            self._ledger.give("gradients", self._at.reduce_bytes * shards)
        if self._at.engine.cpu_offload:
            self._ledger.give("gradients", FP32 * shards)
        else:
            self._reduced += FP32 * shards

    def _accumulate(self, block: int | None) -> None:
        """Before the last micro-batch whole gradients stay, in the type in which they will be reduced."""
        fresh = self._fresh.pop(block, 0)
        if not self._at.is_narrow:
            self._accumulated[block] = self._accumulated.get(block, 0) + fresh
            return
        if block not in self._accumulated:
            trained = numel_of(p for p in self._at.shape.members(block) if p.is_trained)
            self._accumulated[block] = self._at.reduce_bytes * trained
            self._ledger.take("gradients", self._accumulated[block])
        self._ledger.give("gradients", fresh)
