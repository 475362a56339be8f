"""What DeepSpeed adds to a step: buckets, the gradients of a rank's ranges, and the parameters that stage 3 gathers.

After deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and bf16_optimizer.py (DeepSpeed 0.19).
"""

from __future__ import annotations

from penstock_components.planning.engine_replay import EngineReplay
from penstock_components.planning.ledger import Ledger
from penstock_components.planning.placement import (
    FP32,
    FlatGroup,
    Placement,
    chunk,
    decay_groups,
    flat_groups,
    numel_of,
)
from penstock_components.planning.shape import Parameter
from penstock_components.planning.states import bucket_numel
from penstock_components.planning.zero3 import Moment, gathered_numel

_FP64 = 8


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
        self._oversized = 0
        """Bytes of a gradient that does not fit into the bucket."""
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
        self._ledger.give("gradients", item * parameter.numel)
        if parameter.numel > bucket_numel(self._at):  # it stays beside the bucket
            self._oversized = item * parameter.numel
            self._ledger.take("communication", self._oversized)

    def _flush(self) -> None:
        if not self._bucket:
            return
        numel = numel_of(self._bucket)
        copied = self._bucket_item * numel if self._slices() > 1 else 0
        cast = self._at.reduce_bytes * numel if self._at.reduce_bytes != self._bucket_item else 0
        holds_own = any(parameter.name in self._own for parameter in self._bucket)
        if holds_own and self._is_compact:
            self._take_partition()
        self._ledger.pass_through("communication", copied + cast)
        if holds_own and not self._is_compact:
            self._take_partition()
        self._ledger.give("communication", self._oversized)
        self._bucket, self._oversized = [], 0

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
