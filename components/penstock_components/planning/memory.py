"""What a rank needs of its device's memory and of its host's: the model states, and the fullest moment of a step.

States are exact (`penstock_components.planning.states`). The peak is that of a replayed step, in bytes of tensors: what
torch's allocator, its caches, CUDA's context, NCCL's buffers and kernels need beside them is not in it, nor what
torch.compile saves. Formulas: ZeRO (arXiv:1910.02054) for states, Korthikanti et al. (arXiv:2205.05198) for activations,
our own code for what is kept where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from penstock_components.planning.engine_replay import EngineReplay
from penstock_components.planning.ledger import Ledger
from penstock_components.planning.placement import Device, Placement
from penstock_components.planning.replay import replay_step
from penstock_components.planning.shape import ModelShape
from penstock_components.planning.states import (
    Held,
    ModelStates,
    checkpoint_bytes,
    keeps_fp32_gradients,
    model_states,
)
from penstock_components.planning.torch_replay import DdpReplay, FsdpReplay
from penstock_components.planning.zero_replay import Bf16OptimizerReplay, Zero3Replay, ZeroReplay
from penstock_trainer.contract.config import JobConfig, ModelConfig
from penstock_trainer.contract.deepspeed_keys import KNOWN_KEYS


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Bytes on the device at the fullest moment of a step, by what they are of."""

    parameters: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """Parameters that are whole for a while: FSDP's blocks, ZeRO-3's, the narrow copies of autocast."""
    communication: int = 0
    """Buckets and the flat tensors of collectives."""
    activations: int = 0
    """What forward keeps for backward, and the gradients of it."""
    logits: int = 0
    """Logits, their softmax and their gradients; with a chunked loss also the gradients that forward makes."""
    other: int = 0
    """The batch, rotary angles, buffers."""

    @property
    def total(self) -> int:
        """Of all."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank holds."""

    states: ModelStates
    """Exact, with the gradients as backward leaves them."""
    peak: Peak | None
    """None for a model whose activations are not known: all but the built-in decoder."""
    micro_batch: int
    """Samples that go through the model at once."""
    accumulation: int
    """Micro-batches of a step."""
    save_buffer: int
    """Bytes of host memory that a save copies this rank's share of the checkpoint to, about: shares differ a little."""
    unmodelled: tuple[str, ...]
    """Fields of the config that change memory in a way that is not accounted for."""

    @property
    def device(self) -> int:
        """Bytes on the device: the peak, or the states alone where that is not known."""
        return self.peak.total if self.peak is not None else self.states.device.total

    @property
    def host(self) -> int:
        """Bytes of offloaded states on the host."""
        return self.states.host.total


def rank_memory(
    config: JobConfig,
    shape: ModelShape,
    *,
    world_size: int,
    ranks_per_node: int,
    rank: int = 0,
    device: Device = "cuda",
) -> RankMemory:
    """What a rank of this job needs. Ranks differ by padding, and ZeRO's by the sizes of what their ranges hold.

    Raises ContractError for a world that the config does not fit.
    """
    at = Placement(
        config=config, shape=shape, world_size=world_size, ranks_per_node=ranks_per_node, device=device
    )
    states = model_states(at, rank=rank)
    peak = _peak(at, states.device, keeps_gradients=states.keeps_gradients, rank=rank)
    return RankMemory(
        states=states,
        peak=peak,
        micro_batch=at.micro_batch,
        accumulation=at.accumulation,
        save_buffer=checkpoint_bytes(at) // world_size,
        unmodelled=tuple(_unmodelled(at)),
    )


def _unmodelled(at: Placement) -> Iterator[str]:
    engine, model = at.engine, at.shape.decoder
    if model is not None and at.device == "cuda" and _attends_unfused(at, model):
        yield "model.num_kv_heads"
    if engine.wrap_class:
        yield "engine.wrap_class"
    if engine.compile:
        yield "engine.compile"
    for name, value in (engine.deepspeed.get("zero_optimization") or {}).items():
        default = KNOWN_KEYS["zero_optimization"][name]
        is_default = value in (None, "auto") or (isinstance(default, tuple) and value == default[1])
        if name not in _MODELLED and not is_default:
            yield f"engine.deepspeed.zero_optimization.{name}"


_MODELLED = frozenset(
    {
        "stage",
        "overlap_comm",
        "parameter_alignment",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "offload_optimizer",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
    }
)


def _attends_unfused(at: Placement, model: ModelConfig) -> bool:
    """Whether CUDA has no fused kernel for the attention: flash takes neither fp32 nor a window's mask, and the efficient
    kernel, which takes both, no grouped heads (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Its scores, which
    then grow with the square of the length, are not counted."""
    is_windowed = model.sliding_window is not None and at.config.data.seq_len > model.sliding_window
    return model.num_kv_heads < model.num_heads and (is_windowed or not at.is_narrow)


def _peak(at: Placement, held: Held, *, keeps_gradients: bool, rank: int) -> Peak | None:
    model = at.shape.decoder
    if model is None or at.shape.num_blocks != model.num_layers:
        return None
    ledger = Ledger()
    ledger.take("parameters", held.parameters)
    ledger.take("masters", held.masters)
    ledger.take("optimizer", held.optimizer)
    ledger.take("communication", held.buffers)
    ledger.take("gradients", held.gradients if keeps_gradients else 0)
    ledger.take("other", at.shape.buffers)
    before = ledger.now
    replay_step(at, model, ledger, _engine(at)(at, ledger, rank))
    assert ledger.now == before, f"a step left {ledger.now - before} bytes"
    return Peak(**{str(kind): size for kind, size in ledger.at_peak.items()})


def _engine(at: Placement) -> type[EngineReplay]:
    """What the config's engine adds to a step."""
    if at.is_whole:
        return EngineReplay
    if at.engine.strategy == "ddp":
        return DdpReplay
    if not at.is_zero:
        return FsdpReplay
    if at.engine.strategy == "zero3":
        return Zero3Replay
    return Bf16OptimizerReplay if keeps_fp32_gradients(at) else ZeroReplay
