"""How a model and a batch are cut over the ranks: the sizes that memory and traffic share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock_components.planning.shape import ModelShape, Parameter
from penstock_trainer.contract.config import EngineConfig, JobConfig
from penstock_trainer.contract.deepspeed_keys import KNOWN_KEYS
from penstock_trainer.contract.fields import require

Device = Literal["cuda", "cpu"]
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A job on so many ranks."""

    config: JobConfig
    shape: ModelShape
    world_size: int
    ranks_per_node: int
    device: Device = "cuda"

    def __post_init__(self) -> None:
        require(self.world_size > 0, "world_size", self.world_size, "at least 1")
        require(self.ranks_per_node > 0, "ranks_per_node", self.ranks_per_node, "at least 1")
        batch = self.config.global_batch
        require(
            batch % self.world_size == 0, "global_batch", batch, f"a multiple of the {self.world_size} ranks"
        )
        require(
            self.world_size % self.shard_size == 0,
            "engine.shard_size",
            self.shard_size,
            f"a divisor of the {self.world_size} ranks",
        )

    @property
    def engine(self) -> EngineConfig:
        """The config's."""
        return self.config.engine

    @property
    def micro_batch(self) -> int:
        """Samples that go through the model at once."""
        return self.config.micro_batch(self.world_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each rank."""
        return self.config.global_batch // self.world_size // self.micro_batch

    @property
    def item_bytes(self) -> int:
        """Of an element in the compute type."""
        return ITEM_BYTES[self.engine.precision]

    @property
    def reduce_bytes(self) -> int:
        """Of an element of a gradient as it is reduced."""
        return ITEM_BYTES[self.engine.reduce_dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether the compute type is narrower than fp32."""
        return self.engine.precision != "fp32"

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed is the engine."""
        return self.engine.strategy.startswith("zero")

    @property
    def is_whole(self) -> bool:
        """Whether a lone rank does without its strategy (penstock_trainer.engines.torch_mesh._spread)."""
        engine = self.engine
        is_plain = engine.strategy == "ddp" or not (self.is_narrow or engine.cpu_offload)
        return self.world_size == 1 and not self.is_zero and is_plain

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the parameters under FSDP2, of the optimizer state under DeepSpeed."""
        engine = self.engine
        if engine.strategy == "ddp":
            return 1
        if engine.strategy != "fsdp-hybrid":
            return self.world_size
        of_replicas = self.world_size // engine.replicate_size if engine.replicate_size else 0
        return engine.shard_size or of_replicas or min(self.ranks_per_node, self.world_size)

    @property
    def overlaps(self) -> bool:
        """Whether DeepSpeed reduces while backward runs; the engine asks for it on GPUs."""
        told = self.option("overlap_comm")
        return self.device == "cuda" if told is None else bool(told)

    def option(self, name: str) -> Any:
        """`zero_optimization.<name>` of the user's DeepSpeed config, or DeepSpeed's default."""
        section = self.engine.deepspeed.get("zero_optimization") or {}
        told = section.get(name)
        return KNOWN_KEYS["zero_optimization"][name][1] if told in (None, "auto") else told


def chunk(numel: int, parts: int) -> int:
    """Elements of each of so many equal parts, the last one padded."""
    return -(-numel // parts)


def shard_numel(parameter: Parameter, shards: int) -> int:
    """Elements of a parameter's padded shard under FSDP2, which cuts dim 0
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`)."""
    rows, *rest = parameter.shape or (1,)
    return chunk(rows, shards) * math.prod(rest)


def held_numel(parameter: Parameter, shards: int, rank: int) -> int:
    """Elements of it that are not padding, on a rank of its shards."""
    rows, *rest = parameter.shape or (1,)
    size = chunk(rows, shards)
    return max(0, min(rows, (rank + 1) * size) - rank * size) * math.prod(rest)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters that DeepSpeed's stages 1 and 2 flatten into one tensor, of which each rank owns an equal range."""

    parameters: tuple[Parameter, ...]
    starts: tuple[int, ...]
    """Of each parameter in the flat tensor."""
    numel: int
    """With padding."""
    ranks: int

    @property
    def partition(self) -> int:
        """Elements of a rank's range."""
        return self.numel // self.ranks

    def of(self, rank: int) -> tuple[Parameter, ...]:
        """The parameters of which the rank's range holds a part."""
        begin, end = rank * self.partition, (rank + 1) * self.partition
        return tuple(
            parameter
            for parameter, start in zip(self.parameters, self.starts, strict=True)
            if start < end and start + parameter.numel > begin
        )


def flat_groups(at: Placement) -> list[FlatGroup]:
    """One for matrices and one for the rest, as penstock_trainer.optim groups them. Each is padded to a multiple of
    twice the ranks (nccl_start_alignment_factor, deepspeed/runtime/zero/stage_1_and_2.py)."""
    unit = 16 // at.item_bytes if at.option("parameter_alignment") else 1
    alignment = 2 * at.world_size
    alignment = math.lcm(alignment, unit)
    return [_flat(members, unit, alignment, at.world_size) for members in decay_groups(at.shape)]


def decay_groups(shape: ModelShape) -> list[tuple[Parameter, ...]]:
    """The optimizer's parameter groups (penstock_trainer.optim.build_optimizer)."""
    matrices = tuple(parameter for parameter in shape.trained if parameter.decays)
    others = tuple(parameter for parameter in shape.trained if not parameter.decays)
    return [group for group in (matrices, others) if group]


def _flat(members: Sequence[Parameter], unit: int, alignment: int, ranks: int) -> FlatGroup:
    starts, end = [], 0
    for parameter in members:
        start = chunk(end, unit) * unit
        starts.append(start)
        end = start + parameter.numel
    return FlatGroup(tuple(members), tuple(starts), chunk(end, alignment) * alignment, ranks)


def gradient_order(shape: ModelShape) -> list[Parameter]:
    """Trained parameters as their gradients are finished in a backward pass.

    Of the built-in decoder the order of its operations backwards; of another model the reverse of its parameters. The
    tied embedding is finished last: its gradient is a sum.
    """
    if shape.decoder is None:
        return list(reversed(shape.trained))
    named = {parameter.name: parameter for parameter in shape.trained}
    layers = (
        f"layers.{layer}.{name}"
        for layer in reversed(range(shape.decoder.num_layers))
        for name in _LAYER_BACKWARDS
    )
    names = ["lm_head.weight", "norm.weight", *layers, "embed_tokens.weight"]
    return [named[name] for name in names if name in named]


_LAYER_BACKWARDS = (
    "mlp.down_proj.weight",
    "mlp.up_proj.weight",
    "mlp.gate_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.o_proj.weight",
    "self_attn.v_proj.bias",
    "self_attn.v_proj.weight",
    "self_attn.k_norm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_proj.bias",
    "self_attn.k_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.q_proj.weight",
    "input_layernorm.weight",
)


def numel_of(parameters: Iterable[Parameter]) -> int:
    """Elements of them all."""
    return sum(parameter.numel for parameter in parameters)
