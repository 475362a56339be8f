"""What held the memory when it ran out, and which setting would help."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.observe.accelerator import peak_memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one rank's device when its memory ran out."""

    weights: int
    """What the rank holds of them, with the fp32 masters of a narrower type."""
    gradients: int
    """Once each weight that the rank holds gradients for has one."""
    optimizer: int
    peak: int
    """The most that was in use: on CUDA torch's tensors, on CPU all of the process."""
    capacity: int
    """Of the device; on CPU of the machine."""
    ranks: int
    """Of the run."""

    @property
    def activations(self) -> int:
        """The rest of the peak: what forward keeps for backward, logits, and room for work."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it follows from, says that memory ran out."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(seen, RuntimeError) and "can't allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def measure(
    model: nn.Module, state: Mapping[str, Any], config: JobConfig, *, device: torch.device, ranks: int
) -> MemoryUse:
    """Of a model that an engine has taken over; `state` is Engine.state()."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = _bytes(model.parameters())
    masters = _bytes(_tensors(state["model"]))
    is_zero = config.engine.strategy.startswith("zero")
    # From stage 2 on a rank keeps the gradients of its own part only.
    gradients = masters if config.engine.strategy in ("zero2", "zero3") else _bytes(trained)
    return MemoryUse(
        weights=held + (masters if is_zero else 0),
        gradients=gradients,
        optimizer=_bytes(_tensors(state["opt"])),
        peak=peak_memory_bytes(device),
        capacity=_capacity(device),
        ranks=ranks,
    )


def explain(use: MemoryUse | None, config: JobConfig) -> str:
    """What held the memory, and the settings that would help and are not on, the most effective first.

    `use` is None when memory ran out before the model was spread over the ranks.
    """
    of_state = list(_for_state(config, ranks=use.ranks if use else 0))
    of_activations = list(_for_activations(config))
    if use is None:
        told = "Memory ran out before the first step, while the model was built or spread over the ranks."
        settings = of_state
    else:
        state = use.weights + use.gradients + use.optimizer
        told = (
            f"Memory ran out. Of {_gib(use.peak)} at most in use ({_gib(use.capacity)} are there): weights "
            f"{_gib(use.weights)}, gradients {_gib(use.gradients)}, optimizer state {_gib(use.optimizer)}, the rest, which "
            f"is activations above all, {_gib(use.activations)}."
        )
        is_state = state > use.activations
        settings = [*of_state, *of_activations] if is_state else [*of_activations, *of_state]
    if not settings:
        return f"{told} Every setting that saves memory is on: take more ranks, a bigger accelerator or a smaller model."
    return f"{told} What would help, the most effective first: {'; '.join(settings)}."


def _for_activations(config: JobConfig) -> Iterator[str]:
    """In the order of what they save for what they cost."""
    engine = config.engine
    if config.max_micro_batch > 1:
        yield f"max_micro_batch {config.max_micro_batch // 2} (now {config.max_micro_batch}; the global batch stays)"
    if engine.activation_checkpointing != "full":
        yield f"engine.activation_checkpointing full (now {engine.activation_checkpointing}; costs a third more compute)"
    if not engine.loss_chunk_tokens and not config.model.source:
        yield "engine.loss_chunk_tokens 4096 (now all logits exist at once)"
    if engine.precision == "fp32":
        yield "engine.precision bf16 (now fp32)"


def _for_state(config: JobConfig, *, ranks: int) -> Iterator[str]:
    """`ranks` 0: not known. One rank has nobody to share with."""
    strategy = config.engine.strategy
    if ranks != 1:
        sharper = {"zero1": "zero3", "zero2": "zero3", "ddp": "fsdp-full", "fsdp-hybrid": "fsdp-full"}
        if strategy in sharper:
            yield f"engine.strategy {sharper[strategy]} (now {strategy}, which holds more of the state on each rank)"
    if not config.engine.cpu_offload:
        with_it = "" if strategy != "ddp" else ", with engine.strategy fsdp-full"
        yield f"engine.cpu_offload true (now false{with_it}; host memory and slower steps)"


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, Tensor):
        yield tree


def _bytes(tensors: Iterable[Tensor]) -> int:
    """On this rank. Of a parameter of ZeRO stage 3, the part that it is left with between uses."""
    total = 0
    for tensor in tensors:
        local: Any = (
            tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
        )
        local = local.flat if isinstance(local, FlatShard) else local
        total += local.numel() * local.element_size()
    return total


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
