"""What each engine adds to a step: parameters that it gathers, and what becomes of gradients as they are finished.

After torch/nn/parallel/distributed.py and reducer.cpp, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and
_fsdp_collectives.py (torch 2.13), and deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and bf16_optimizer.py (0.19).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_components.planning.ledger import Ledger
from penstock_components.planning.placement import (
    FP32,
    FlatGroup,
    Placement,
    chunk,
    decay_groups,
    flat_groups,
    numel_of,
    shard_numel,
)
from penstock_components.planning.shape import Parameter
from penstock_components.planning.states import bucket_numel, keeps_fp32_gradients
from penstock_components.planning.zero3 import Moment, gathered_numel

_FP64 = 8


class EngineReplay:
    """A lone rank, which needs no engine: gradients are added up where backward leaves them. Base of the others."""

    def __init__(self, at: Placement, ledger: Ledger, rank: int) -> None:
        self._at, self._ledger, self._rank = at, ledger, rank
        self._named = {parameter.name: parameter for parameter in at.shape.parameters}
        self._added: set[str] = set()
        """Parameters whose gradient has been kept in this step."""
        self._is_first = self._is_last = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Forward of a micro-batch begins."""
        self._is_first, self._is_last = is_first, is_last

    def enter(self, block: int) -> None:
        """A block's forward begins."""

    def leave(self, block: int) -> None:
        """A block's forward has ended."""

    def begin_backward(self) -> None:
        """Forward has ended, and backward begins."""

    def enter_backward(self, block: int) -> None:
        """A block's backward begins."""

    def leave_backward(self, block: int) -> None:
        """A block's backward has ended."""

    def make_gradient(self, name: str, item: int) -> None:
        """Autograd makes a parameter's gradient, of `item` bytes an element."""
        self._ledger.take("gradients", item * self._numel(name))

    def add_gradient(self, name: str, item: int) -> None:
        """One that waited, of `item` bytes an element, is added to the one just made."""
        self._ledger.give("gradients", item * self._numel(name))

    def finish_gradient(self, name: str, item: int) -> None:
        """It is the parameter's: kept in fp32, and added to where there is one."""
        self._keep(name, item, FP32)

    def end_backward(self) -> None:
        """Backward of a micro-batch has ended."""

    def step(self) -> None:
        """The optimizer's step; gradients are freed."""
        self._ledger.give("gradients", FP32 * sum(self._numel(name) for name in self._added))
        self._added.clear()

    def _keep(self, name: str, item: int, kept_item: int) -> None:
        numel = self._numel(name)
        if name in self._added:
            self._ledger.give("gradients", item * numel)
            return
        self._added.add(name)
        if item != kept_item:
            self._ledger.take("gradients", kept_item * numel)
            self._ledger.give("gradients", item * numel)

    def _numel(self, name: str) -> int:
        parameter = self._named[name]
        return parameter.numel if parameter.is_trained else 0


class DdpReplay(EngineReplay):
    """Gradients of the last micro-batch go into the buckets, which are held all the time; those of earlier ones add up
    beside them. Under autocast matrices have a narrow copy from forward to backward."""

    def enter(self, block: int) -> None:
        """See EngineReplay.enter."""
        self._ledger.take("gathered", self._copies(self._at.shape.members(block)))

    def begin_backward(self) -> None:
        """See EngineReplay.begin_backward."""
        self._ledger.take("gathered", self._copies(self._head()))

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

    def _head(self) -> Iterable[Parameter]:
        return [p for p in self._at.shape.members(None) if p.name == "lm_head.weight"]

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


class ZeroReplay(EngineReplay):
    """DeepSpeed's stages 1 and 2: gradients go through a bucket, all-reduced when it is full, of which a rank keeps what
    belongs to its ranges."""

    def __init__(self, at: Placement, ledger: Ledger, rank: int) -> None:
        super().__init__(at, ledger, rank)
        self._groups = flat_groups(at)
        is_accumulated_wide = at.engine.strategy == "zero1" and at.is_narrow
        self._bucket_item = FP32 if is_accumulated_wide else at.item_bytes
        self._buffers = 0
        self._bucket: list[Parameter] = []
        self._own = {p.name for group in self._groups for p in group.of(rank)}
        self._partition = 0
        """Bytes of this micro-batch's gradients of the rank's ranges."""
        self._kept = 0

    def finish_gradient(self, name: str, item: int) -> None:
        """See EngineReplay.finish_gradient."""
        if not self._numel(name):
            return
        self._open()
        if self._at.engine.strategy == "zero1" and not (self._is_last and self._at.overlaps):
            self._keep(name, item, self._bucket_item)
            return
        if name in self._added:
            self._ledger.give("gradients", item * self._numel(name))
            item = self._bucket_item
        self._put(self._named[name], item)

    def end_backward(self) -> None:
        """See EngineReplay.end_backward."""
        if self._at.engine.strategy == "zero1" and self._is_last and not self._at.overlaps:
            for group in decay_groups(self._at.shape):
                for parameter in group:
                    self._put(parameter, self._bucket_item)
        if self._is_last or self._at.engine.strategy == "zero2":
            self._flush()
            self._ledger.give("communication", self._buffers)
            self._buffers = 0
        if self._kept and not self._is_compact:
            self._ledger.give("gradients", self._partition)
        else:
            self._kept += self._partition
        self._partition = 0

    def step(self) -> None:
        """See EngineReplay.step. Norms are fp64; then each group's gradients are flattened once more."""
        self._ledger.pass_through("other", _FP64 * self._largest_part())
        for index, group in enumerate(self._groups):
            flat = 0 if self._is_compact or self._at.engine.cpu_offload else FP32 * group.partition
            self._ledger.take("gradients", flat)
            if index == len(self._groups) - 1:
                self._ledger.give("gradients", self._kept)
            self._ledger.give("gradients", flat)
        self._kept = 0
        self._added.clear()

    @property
    def _is_compact(self) -> bool:
        return self._at.is_narrow

    def _open(self) -> None:
        if not self._buffers:
            count = 2 if self._at.overlaps else 1
            self._buffers = count * self._bucket_item * bucket_numel(self._at)
            self._ledger.take("communication", self._buffers)

    def _put(self, parameter: Parameter, item: int) -> None:
        if self._bucket and numel_of(self._bucket) + parameter.numel > bucket_numel(self._at):
            self._flush()
        self._bucket.append(parameter)
        if parameter.numel <= bucket_numel(self._at):
            self._ledger.give("gradients", item * parameter.numel)
            return
        self._ledger.give("gradients", item * parameter.numel)
        self._ledger.take("communication", item * parameter.numel)

    def _flush(self) -> None:
        if not self._bucket:
            return
        numel = numel_of(self._bucket)
        copied = self._bucket_item * numel if self._slices() > 1 else 0
        cast = self._at.reduce_bytes * numel if self._at.reduce_bytes != self._bucket_item else 0
        self._ledger.pass_through("communication", copied + cast)
        if any(parameter.name in self._own for parameter in self._bucket):
            self._take_partition()
        if numel > bucket_numel(self._at):
            self._ledger.give("communication", self._bucket_item * numel)
        self._bucket = []

    def _take_partition(self) -> None:
        if self._partition or (self._is_compact and self._kept) or self._at.engine.cpu_offload:
            return
        if self._is_compact:
            self._partition = FP32 * sum(group.partition for group in self._groups)
        else:
            self._partition = FP32 * sum(numel_of(group.of(self._rank)) for group in self._groups)
        self._ledger.take("gradients", self._partition)

    def _slices(self) -> int:
        """Pieces of the bucket that belong to one rank each, neighbours together."""
        owners = [owner for parameter in self._bucket for owner in self._owners(parameter)]
        if self._is_compact:
            return len(owners)
        return sum(1 for before, owner in zip([None, *owners], owners, strict=False) if before != owner)

    def _owners(self, parameter: Parameter) -> range:
        for group in self._groups:
            if parameter in group.parameters:
                start = group.starts[group.parameters.index(parameter)]
                return range(start // group.partition, (start + parameter.numel - 1) // group.partition + 1)
        return range(0)

    def _largest_part(self) -> int:
        return max((_overlap(group, self._rank) for group in self._groups), default=0)


class Bf16OptimizerReplay(EngineReplay):
    """DeepSpeed's stage 1 in bf16: narrow gradients of all parameters, which are added to fp32 ones that stay."""

    def finish_gradient(self, name: str, item: int) -> None:
        """See EngineReplay.finish_gradient."""
        self._keep(name, item, item)

    def end_backward(self) -> None:
        """See EngineReplay.end_backward."""
        self._ledger.pass_through("gradients", FP32 * max(self._numel(name) for name in self._named))
        if self._is_last:
            self._ledger.pass_through(
                "communication", FP32 * sum(group.numel for group in flat_groups(self._at))
            )
            self._ledger.give("gradients", self._at.item_bytes * sum(map(self._numel, self._added)))
            self._added.clear()

    def step(self) -> None:
        """See EngineReplay.step."""


class Zero3Replay(EngineReplay):
    """DeepSpeed's stage 3: parameters are gathered ahead, up to its limits, and gradients scattered bucket by bucket."""

    def __init__(self, at: Placement, ledger: Ledger, rank: int) -> None:
        super().__init__(at, ledger, rank)
        self._numel_at = gathered_numel(at)
        self._gathered = 0
        self._bucket: list[Parameter] = []

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """See EngineReplay.begin."""
        super().begin(is_first=is_first, is_last=is_last)
        self._gather((None, True))

    def enter(self, block: int) -> None:
        """See EngineReplay.enter."""
        self._gather((block, True))

    def leave(self, block: int) -> None:
        """See EngineReplay.leave. After the last block what is held is what backward begins with."""
        if block == self._at.shape.num_blocks - 1:
            self._gather((None, False))

    def enter_backward(self, block: int) -> None:
        """See EngineReplay.enter_backward."""
        self._gather((block, False))

    def _gather(self, moment: Moment) -> None:
        """Hold what is held then; a model of one piece has no other moments than its own."""
        size = self._at.item_bytes * self._numel_at.get(moment, self._numel_at[None, moment[1]])
        self._ledger.take("gathered", max(0, size - self._gathered))
        self._ledger.give("gathered", max(0, self._gathered - size))
        self._gathered = size

    def finish_gradient(self, name: str, item: int) -> None:
        """See EngineReplay.finish_gradient."""
        parameter = self._named[name]
        if not parameter.is_trained:
            return
        if self._bucket and numel_of(self._bucket) + parameter.numel > bucket_numel(self._at):
            self._flush()
        self._bucket.append(parameter)
        self._ledger.give("gradients", item * parameter.numel)
        if parameter.numel > bucket_numel(self._at):
            self._ledger.take("communication", item * parameter.numel)

    def end_backward(self) -> None:
        """See EngineReplay.end_backward."""
        self._flush()
        self._ledger.give("gathered", self._gathered)
        self._gathered = 0

    def step(self) -> None:
        """See EngineReplay.step."""
        largest = max((chunk(p.numel, self._at.world_size) for p in self._at.shape.trained), default=0)
        self._ledger.pass_through("other", _FP64 * largest)

    def _flush(self) -> None:
        """Gradients of the bucket side by side, padded; gloo's reduce-scatter makes another tensor of that size."""
        if not self._bucket:
            return
        ranks = self._at.world_size
        padded = self._at.reduce_bytes * ranks * sum(chunk(p.numel, ranks) for p in self._bucket)
        self._ledger.pass_through("communication", padded * (2 if self._at.device == "cpu" else 1))
        numel = numel_of(self._bucket)
        if numel > bucket_numel(self._at):
            self._ledger.give("communication", self._at.item_bytes * numel)
        self._bucket = []


def engine_replay(at: Placement, ledger: Ledger, rank: int) -> EngineReplay:
    """What the config's engine adds to a step."""
    if at.is_whole:
        return EngineReplay(at, ledger, rank)
    if at.engine.strategy == "ddp":
        return DdpReplay(at, ledger, rank)
    if not at.is_zero:
        return FsdpReplay(at, ledger, rank)
    if at.engine.strategy == "zero3":
        return Zero3Replay(at, ledger, rank)
    return (Bf16OptimizerReplay if keeps_fp32_gradients(at) else ZeroReplay)(at, ledger, rank)


def _overlap(group: FlatGroup, rank: int) -> int:
    """Elements of the largest part of a parameter in a rank's range."""
    begin, end = rank * group.partition, (rank + 1) * group.partition
    return max(
        (
            min(end, start + parameter.numel) - max(begin, start)
            for parameter, start in zip(group.parameters, group.starts, strict=True)
        ),
        default=0,
    )
