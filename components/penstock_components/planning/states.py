"""Bytes of the model states that a rank holds: parameters, masters, gradients, optimizer state. Exact, with padding.

What each engine keeps follows its own code: torch's DistributedDataParallel (gradients are views of its buckets), FSDP2
(torch/distributed/fsdp/_fully_shard) and DeepSpeed 0.19 (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py,
bf16_optimizer.py). The scheme of the three stages is that of ZeRO (arXiv:1910.02054, section 5); the constants differ from
its K = 12 where an engine keeps more. tests/distributed/test_planner.py compares all with counted tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from penstock_components.planning.placement import (
    FP32,
    Placement,
    chunk,
    decay_groups,
    flat_groups,
    held_numel,
    numel_of,
    shard_numel,
)
from penstock_components.planning.shape import Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes in one memory, of the device or of the host."""

    parameters: int = 0
    """What the rank keeps of those that the model computes with."""
    masters: int = 0
    """fp32 copies beside them."""
    gradients: int = 0
    """When backward of the step's last micro-batch has ended."""
    optimizer: int = 0
    buffers: int = 0
    """That the engine holds between steps for communication or transfers."""

    @property
    def total(self) -> int:
        """Of all."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """What a rank holds of a model, by where it lies."""

    device: Held
    host: Held
    """Of offloaded states; zero without."""
    keeps_gradients: bool
    """Whether gradients are held between steps too."""


def model_states(at: Placement, *, rank: int = 0) -> ModelStates:
    """The states of one rank."""
    if at.engine.strategy == "ddp" or at.is_whole:
        return _replicated(at)
    kinds: dict[str, Callable[[Placement, int], ModelStates]] = {
        "fsdp-full": _fsdp,
        "fsdp-hybrid": _fsdp,
        "zero1": _zero_1_and_2,
        "zero2": _zero_1_and_2,
        "zero3": _zero_3,
    }
    return kinds[at.engine.strategy](at, rank)


def checkpoint_bytes(at: Placement) -> int:
    """Of a whole checkpoint: fp32 weights and the optimizer's state, whatever the strategy."""
    trained = at.shape.trained
    return FP32 * at.shape.num_parameters + _moments(at) * numel_of(trained) + _step_counts(at, len(trained))


def _replicated(at: Placement) -> ModelStates:
    """Every rank has all. Under DDP gradients live in its buckets, which stay."""
    trained = at.shape.trained
    numel = numel_of(trained)
    held = Held(
        parameters=FP32 * at.shape.num_parameters,
        gradients=FP32 * numel,
        optimizer=_moments(at) * numel + _step_counts(at, len(trained)),
    )
    return ModelStates(device=held, host=Held(), keeps_gradients=not at.is_whole)


def _fsdp(at: Placement, rank: int) -> ModelStates:
    """fp32 shards, each padded to the first rank's size; moments are of what is not padding."""
    shards, trained = at.shard_size, at.shape.trained
    held = Held(
        parameters=FP32 * sum(shard_numel(parameter, shards) for parameter in at.shape.parameters),
        gradients=FP32 * sum(shard_numel(parameter, shards) for parameter in trained),
        optimizer=_moments(at) * sum(held_numel(parameter, shards, rank % shards) for parameter in trained)
        + _step_counts(at, len(trained)),
    )
    if at.engine.cpu_offload:
        return ModelStates(device=Held(), host=held, keeps_gradients=False)
    return ModelStates(device=held, host=Held(), keeps_gradients=False)


def _zero_1_and_2(at: Placement, rank: int) -> ModelStates:
    """Whole parameters, of which masters and moments are each rank's range of the flattened groups."""
    groups = flat_groups(at)
    partitions = sum(group.partition for group in groups)
    frozen = numel_of(parameter for parameter in at.shape.parameters if not parameter.is_trained)
    parameters = at.item_bytes * (sum(group.numel for group in groups) + frozen)
    masters = FP32 * partitions
    optimizer = _moments(at) * partitions + _step_counts(at, len(groups))
    if at.engine.cpu_offload:
        return _zero_offloaded(at, rank, Held(parameters=parameters, masters=masters, optimizer=optimizer))
    held = Held(
        parameters=parameters,
        masters=masters,
        optimizer=optimizer,
        gradients=_zero_gradients(at, rank),
    )
    return ModelStates(device=held, host=Held(), keeps_gradients=keeps_fp32_gradients(at))


def keeps_fp32_gradients(at: Placement) -> bool:
    """Whether DeepSpeed's BF16_Optimizer is at work, which stage 1 in bf16 takes for fp32 accumulation: it keeps the fp32
    gradients of all parameters on every rank (deepspeed/runtime/engine.py, `_do_optimizer_sanity_check`)."""
    engine = at.engine
    return engine.strategy == "zero1" and engine.precision == "bf16" and not engine.cpu_offload


def _zero_gradients(at: Placement, rank: int) -> int:
    """In fp32, whole gradients of the parameters in the rank's ranges and zeros for the padding; in a narrower type, fp32
    ranges (`copy_grads_in_partition`, `get_flat_partition` and `_build_compact_grad_partition_buffer`)."""
    groups = flat_groups(at)
    if keeps_fp32_gradients(at):
        return FP32 * sum(group.numel for group in groups)
    if at.is_narrow and at.engine.strategy == "zero2":
        return FP32 * sum(group.partition for group in groups)
    numel = 0
    for group in groups:
        members = group.of(rank)
        end = max((s + p.numel for p, s in zip(group.parameters, group.starts, strict=True)), default=0)
        padding = min(group.partition, max(0, (rank + 1) * group.partition - end))
        numel += numel_of(members) + padding
    return FP32 * numel


def _zero_offloaded(at: Placement, rank: int, held: Held) -> ModelStates:
    """Masters, their gradients and moments on the host, and a buffer there and here for transfers.

    Stage 2 in fp32 adds up micro-batches in buffers of their own (`async_accumulate_grad_in_cpu_via_gpu`).
    """
    largest = at.item_bytes * max(parameter.numel for parameter in at.shape.trained)
    groups = flat_groups(at)
    buffers = at.item_bytes * sum(group.partition for group in groups) + largest
    if at.accumulation > 1 and at.engine.strategy == "zero2" and not at.is_narrow:
        buffers += FP32 * sum(numel_of(group.of(rank)) for group in groups)
    host = Held(
        masters=held.masters,
        gradients=FP32 * sum(group.partition for group in groups),
        optimizer=held.optimizer,
        buffers=buffers,
    )
    device = Held(parameters=held.parameters, buffers=largest)
    return ModelStates(device=device, host=host, keeps_gradients=True)


def _zero_3(at: Placement, _rank: int) -> ModelStates:
    """Each parameter cut into equal flat parts, the last one padded; small ones also stay whole on every rank."""
    trained = at.shape.trained
    part = sum(chunk(parameter.numel, at.world_size) for parameter in trained)
    frozen = sum(
        chunk(parameter.numel, at.world_size) for parameter in at.shape.parameters if not parameter.is_trained
    )
    whole = sum(at.world_size * chunk(p.numel, at.world_size) for p in persistent(at))
    offloads = at.engine.cpu_offload
    parameters = at.item_bytes * (part + frozen + whole)
    # In fp32 too: stage3.py means to step on the parts themselves there, but compares a torch.device with a string.
    masters = FP32 * part
    optimizer = _moments(at) * part + _step_counts(at, num_sub_groups(at))
    bucket = at.reduce_bytes * bucket_numel(at)
    if not offloads:
        held = Held(
            parameters=parameters, masters=masters, gradients=FP32 * part, optimizer=optimizer, buffers=bucket
        )
        return ModelStates(device=held, host=Held(), keeps_gradients=True)
    # Beside the gradients' parts, masters have gradients of their own.
    host = Held(masters=masters, gradients=2 * FP32 * part, optimizer=optimizer)
    return ModelStates(device=Held(parameters=parameters, buffers=bucket), host=host, keeps_gradients=True)


def bucket_numel(at: Placement) -> int:
    """Elements of DeepSpeed's reduce bucket (penstock_trainer.contract.deepspeed.bucket_elements)."""
    return max(2, at.engine.bucket_bytes // at.reduce_bytes // 2 * 2)


def persistent(at: Placement) -> list[Parameter]:
    """Those that stage 3 keeps whole on every rank between steps (`mark_persistent_parameters`)."""
    least, most = (
        at.option("stage3_param_persistence_threshold"),
        at.option("stage3_model_persistence_threshold"),
    )
    found: list[Parameter] = []
    numel = 0
    for parameter in at.shape.parameters:
        if numel + parameter.numel <= most and parameter.numel <= least:
            found.append(parameter)
            numel += parameter.numel
    return found


def num_sub_groups(at: Placement) -> int:
    """Pieces in which stage 3 steps (`_create_fp16_sub_groups`)."""
    most, count = at.option("sub_group_size"), 0
    for group in decay_groups(at.shape):
        sizes = [chunk(parameter.numel, at.world_size) for parameter in group]
        if most >= sum(sizes):
            count += 1
            continue
        size = 0
        for index, one in enumerate(sizes):
            size += one
            if size >= most or index == len(sizes) - 1:
                count, size = count + 1, 0
    return count


def _moments(at: Placement) -> int:
    """Bytes of optimizer state for each element: two fp32 moments of AdamW, or SGD's momentum where it has one."""
    optim = at.config.optim
    if optim.name == "adamw":
        return 2 * FP32
    return FP32 if optim.momentum else 0


def _step_counts(at: Placement, tensors: int) -> int:
    """AdamW counts its steps in an fp32 scalar for each tensor that it steps on."""
    return FP32 * tensors if at.config.optim.name == "adamw" else 0
