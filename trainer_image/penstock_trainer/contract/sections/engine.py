"""How the model is spread over the ranks, and what its steps are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock_trainer.contract.fields import require

ZeroStrategy = Literal["zero1", "zero2", "zero3"]
Strategy = Literal["ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3"]
Precision = Literal["fp32", "bf16", "fp16"]
ReduceDtype = Literal["fp32", "bf16"]
ActivationCheckpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """One strategy and its settings; a setting that the strategy does not have is refused."""

    strategy: Strategy = "fsdp-full"
    """What each rank holds only a part of:

    ddp          nothing                                 torch DistributedDataParallel
    fsdp-full    parameters, gradients, optimizer state  torch FSDP2
    fsdp-hybrid  the same within a group of ranks, and groups hold copies (HYBRID_SHARD)
    zero1        optimizer state                         DeepSpeed ZeRO
    zero2        gradients too
    zero3        parameters too
    """
    replicate_size: int = 0
    """fsdp-hybrid: groups, each with a copy of the model. 0: world size / shard_size."""
    shard_size: int = 0
    """fsdp-hybrid: ranks of a group. 0: the ranks of a node."""
    precision: Precision = "fp32"
    """Compute type. Master weights and optimizer state are fp32 in all; fp16 scales the loss and needs a GPU."""
    reduce_dtype: ReduceDtype = "fp32"
    """In which gradients of ranks are added up."""
    cpu_offload: bool = False
    """Masters and optimizer state lie in host memory, where the optimizer then steps (fsdp-*, zero*)."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass computes again, block by block: nothing; all but matrix products and attention; all."""
    compile: bool = False
    """torch.compile, block by block."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits exist at once; 0: all. For the built-in decoder."""
    wrap_class: str = ""
    """Class name of a foreign model's blocks. Empty: found by class, else by size; the log says which."""
    reshard_after_forward: bool = True
    """fsdp-*: free a block's parameters after forward and gather them again in backward."""
    find_unused_parameters: bool = False
    """ddp: for models whose forward does not use every parameter in every step."""
    bucket_bytes: int = 64 * 1024 * 1024
    """Size of a gradient bucket; 64 MiB is what Google's Reduction Server guide recommends for PyTorch."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """zero*: the user's own DeepSpeed config; see penstock_trainer.contract.deepspeed for what wins over what."""
    timeout_seconds: int = 600
    """A collective that takes longer fails the attempt."""

    def __post_init__(self) -> None:
        require(self.bucket_bytes > 0, "engine.bucket_bytes", self.bucket_bytes, "positive")
        require(self.timeout_seconds > 0, "engine.timeout_seconds", self.timeout_seconds, "positive")
        require(
            self.loss_chunk_tokens >= 0,
            "engine.loss_chunk_tokens",
            self.loss_chunk_tokens,
            "0 or more tokens",
        )
        for name in ("replicate_size", "shard_size"):
            require(getattr(self, name) >= 0, f"engine.{name}", getattr(self, name), "0 or more ranks")
            self._only_for(name, getattr(self, name) == 0, "fsdp-hybrid")
        self._only_for("reshard_after_forward", self.reshard_after_forward, "fsdp-full", "fsdp-hybrid")
        self._only_for("find_unused_parameters", not self.find_unused_parameters, "ddp")
        self._only_for(
            "cpu_offload", not self.cpu_offload, "fsdp-full", "fsdp-hybrid", *get_args(ZeroStrategy)
        )
        self._only_for("deepspeed", not self.deepspeed, *get_args(ZeroStrategy))
        require(
            not (self.compile and self.strategy == "zero3"),
            "engine.compile",
            self.compile,
            "false with zero3, whose hooks gather parameters inside the blocks and break every graph; use fsdp-full",
        )

    def _only_for(self, name: str, is_default: bool, *strategies: str) -> None:
        require(
            is_default or self.strategy in strategies,
            f"engine.{name}",
            getattr(self, name),
            f"left alone with strategy {self.strategy!r}: it belongs to {', '.join(strategies)}",
        )
