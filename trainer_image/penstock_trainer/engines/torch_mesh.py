"""torch's own strategies on one device mesh: DDP, FSDP2 over all ranks, and FSDP2 within groups of ranks (HSDP).

Mesh axes are `replicate` and `shard`; axes for tensor and pipeline parallelism would follow them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from penstock_trainer.contract.config import EngineConfig, JobConfig
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines.blocks import prepare_blocks
from penstock_trainer.engines.engine import State, StepResult
from penstock_trainer.engines.loss_scale import LossScale
from penstock_trainer.errors import EngineError
from penstock_trainer.model.buffers import persistent_buffers
from penstock_trainer.model.objective import Batch, Objective
from penstock_trainer.observe.clock import Clock
from penstock_trainer.optim import build_optimizer, materialize_state, set_learning_rate, step_if_finite
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchEngine:
    """See Engine."""

    def __init__(
        self, objective: Objective, config: JobConfig, batch: BatchPlan, world: World, clock: Clock
    ) -> None:
        engine = config.engine
        blocks = prepare_blocks(objective.model, engine)
        self._mesh = build_mesh(engine, world)
        self._world_size = world.env.world_size
        self._wrapped, self._sync_gradients = _spread(engine, world)(
            objective, blocks, engine, self._mesh, world
        )
        self._model = objective.model
        self._autocast = _autocast(engine, world)
        self._config = config
        self._batch = batch
        self._clock = clock
        self._is_primary = world.env.is_primary
        self._loss_scale = LossScale() if engine.precision == "fp16" else None
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer(self._trained, config.optim)
        materialize_state(self._optimizer, config.optim)

    def train_step(self, batches: Sequence[Batch], *, num_targets: int, learning_rate: float) -> StepResult:
        """See Engine.train_step."""
        scale = self._loss_scale.value if self._loss_scale else 1.0
        losses = []
        for index, batch in enumerate(batches):
            # Before the last micro-batch gradients add up where they are: one reduction a step.
            self._sync_gradients(index == self._batch.accumulation - 1)
            with self._clock.span("forward"), self._autocast():
                loss = self._wrapped(batch) / num_targets
            # Ranks' gradients are averaged, but it is their sum that belongs to the mean over all targets.
            with self._clock.span("backward"):
                (loss * (scale * self._world_size)).backward()
            losses.append(loss.detach())
        with self._clock.span("optimizer"):
            grad_norm = self._clip(scale)
            if self._loss_scale:
                self._loss_scale.update(overflowed=not torch.isfinite(grad_norm))
            set_learning_rate(self._optimizer, learning_rate)
            step_if_finite(self._optimizer, grad_norm)
            self._optimizer.zero_grad(set_to_none=True)
        return StepResult(torch.cat(losses).sum(), grad_norm)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See Engine.evaluate."""
        self._wrapped.eval()
        try:
            with self._autocast():
                return cast("Tensor", self._wrapped(batch))
        finally:
            self._wrapped.train()
            self._reshard()

    def state(self) -> State:
        """See Engine.state. Sharded weights and moments are DTensors over the mesh."""
        named = dict(self._model.named_parameters())
        state: State = {
            "model": {
                **{name: parameter.detach() for name, parameter in named.items()},
                **persistent_buffers(self._model),
            },
            "opt": {
                "state": {
                    name: self._optimizer.state[parameter]
                    for name, parameter in named.items()
                    if parameter in self._optimizer.state
                }
            },
        }
        if self._loss_scale:
            state["loss_scale"] = self._loss_scale.state()
        return state

    def state_loaded(self) -> None:
        """See Engine.state_loaded. Nothing is derived: layers gather the shards as they are used."""

    def weights(self) -> dict[str, Tensor]:
        """See Engine.weights. Gathers one parameter at a time."""
        kept = {}
        for name, parameter in self._model.named_parameters():
            whole = _whole(parameter.detach())
            if self._is_primary:
                kept[name] = whole.cpu()
        if self._is_primary:
            kept |= {name: buffer.cpu() for name, buffer in persistent_buffers(self._model).items()}
        return kept

    def _reshard(self) -> None:
        """After a backward pass FSDP2 does so itself; without one, the root would keep its whole parameters, and those
        in the place of the shards in `state`."""
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip(self, scale: float) -> Tensor:
        """Scale gradients down to clip_norm, and by the loss scale; the norm that they had without it."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        scaled_norm = _whole(get_total_norm(gradients, foreach=True))
        clip_norm = self._config.optim.clip_norm * scale
        clip_grads_with_norm_(self._trained, clip_norm, scaled_norm, foreach=True)
        if scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / scale)
        return scaled_norm / scale


def build_mesh(engine: EngineConfig, world: World) -> DeviceMesh:
    """Ranks as [replicate, shard]: ranks of a row hold the parts of one copy of the model.

    Raises EngineError when the sizes that fsdp-hybrid was given do not multiply to the world size.
    """
    ranks = world.env.world_size
    if engine.strategy == "ddp":
        sizes = (ranks, 1)
    elif engine.strategy == "fsdp-full":
        sizes = (1, ranks)
    else:
        shard = engine.shard_size or (
            ranks // engine.replicate_size if engine.replicate_size else world.env.local_world_size
        )
        sizes = (engine.replicate_size or ranks // shard, shard)
    if sizes[0] * sizes[1] != ranks:
        raise EngineError(
            f"a mesh of replicate_size {sizes[0]} x shard_size {sizes[1]} is {sizes[0] * sizes[1]} ranks, and the world "
            f"has {ranks}. Give engine.shard_size a divisor of {ranks} and leave engine.replicate_size at 0."
        )
    logger.info("mesh: replicate=%d shard=%d", *sizes)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicate", "shard"))


_Wrapped = tuple[nn.Module, Callable[[bool], None]]
"""The module to call, and how to say whether the next backward reduces gradients over the ranks."""
_Spread = Callable[[Objective, Sequence[nn.Module], EngineConfig, DeviceMesh, World], _Wrapped]


def _spread(engine: EngineConfig, world: World) -> _Spread:
    """How the strategy is done. A lone rank does without it where nothing but time is lost: FSDP2 casts and offloads too,
    and its copies of what it need not gather cost a lone rank an eighth of a step (docs/benchmarks/train.md)."""
    if world.env.world_size == 1 and (
        engine.strategy == "ddp" or (engine.precision == "fp32" and not engine.cpu_offload)
    ):
        logger.info("%s over one rank: nothing to reduce, shard or gather", engine.strategy)
        return _leave_whole
    return _distribute if engine.strategy == "ddp" else _shard


def _leave_whole(
    objective: Objective, _blocks: Sequence[nn.Module], _engine: EngineConfig, _mesh: DeviceMesh, world: World
) -> _Wrapped:
    return objective.to(world.device), lambda _is_last: None


def _distribute(
    objective: Objective,
    _blocks: Sequence[nn.Module],
    engine: EngineConfig,
    mesh: DeviceMesh,
    world: World,
) -> _Wrapped:
    objective.to(world.device)
    ddp = DistributedDataParallel(
        objective,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=mesh.get_group("replicate"),
        bucket_cap_mb=engine.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        find_unused_parameters=engine.find_unused_parameters,
        forward_sync_buffers=False,
    )
    if engine.reduce_dtype == "bf16":
        ddp.register_comm_hook(mesh.get_group("replicate"), bf16_compress_hook)

    def sync_gradients(is_last: bool) -> None:
        ddp.require_backward_grad_sync = is_last

    return ddp, sync_gradients


def _shard(
    objective: Objective, blocks: Sequence[nn.Module], engine: EngineConfig, mesh: DeviceMesh, world: World
) -> _Wrapped:
    # Inputs are not cast: rotary angles stay fp32, and the residual stream has the parameters' type anyway.
    policy = MixedPrecisionPolicy(
        param_dtype=None if engine.precision == "fp32" else _DTYPES[engine.precision],
        reduce_dtype=_DTYPES[engine.reduce_dtype],
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if engine.strategy == "fsdp-full" else mesh,
        "mp_policy": policy,
        "offload_policy": _offload(engine, world),
        "reshard_after_forward": engine.reshard_after_forward,
    }
    for block in blocks:
        fully_shard(block, **options)
    # The root's parameters are needed again at once: the head's are the first of the backward pass.
    fully_shard(objective, **{**options, "reshard_after_forward": False})
    fsdp = cast("FSDPModule", objective)  # fully_shard adds the class in place

    def sync_gradients(is_last: bool) -> None:
        fsdp.set_requires_gradient_sync(is_last)
        fsdp.set_is_last_backward(is_last)

    return objective, sync_gradients


def _offload(engine: EngineConfig, world: World) -> OffloadPolicy:
    if not engine.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=world.device.type == "cuda")


def _autocast(engine: EngineConfig, world: World) -> Callable[[], AbstractContextManager[Any]]:
    """DDP keeps fp32 parameters and computes in a narrower type; FSDP2 casts as it gathers."""
    if engine.strategy != "ddp" or engine.precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(world.device.type, dtype=_DTYPES[engine.precision])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
