"""torch FSDP2: parameters, gradients and optimizer state are sharded, layer by layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.data import BatchPlan
from penstock_trainer.engines.engine import State, StepResult
from penstock_trainer.model.decoder import Decoder, next_token_loss
from penstock_trainer.optim import build_adamw, materialize_state, set_learning_rate
from penstock_trainer.world import World


class FsdpEngine:
    """See Engine. One mesh axis over all ranks; a world of one rank takes the same path."""

    def __init__(self, model: Decoder, config: JobConfig, batch: BatchPlan, world: World) -> None:
        mesh = init_device_mesh(world.device.type, (world.env.world_size,), mesh_dim_names=("shard",))
        # Inputs are not cast: rotary angles stay fp32, and the residual stream has the parameters' type anyway.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.engine.precision == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self._model = model
        self._fsdp = cast("FSDPModule", model)  # fully_shard adds the class in place
        self._config = config
        self._batch = batch
        self._is_primary = world.env.is_primary
        self._optimizer = build_adamw(model.parameters(), config.optim)
        materialize_state(self._optimizer)

    def train_step(self, tokens: Tensor, *, learning_rate: float) -> StepResult:
        """See Engine.train_step."""
        losses = []
        for index, micro in enumerate(tokens):
            # Before the last micro-batch gradients add up unsharded: memory of one model for one reduction a step.
            is_last = index == self._batch.accumulation - 1
            self._fsdp.set_requires_gradient_sync(is_last)
            self._fsdp.set_is_last_backward(is_last)
            loss = next_token_loss(self._model(micro[:, :-1]), micro[:, 1:]) / self._batch.accumulation
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
            losses.append(loss.detach())
        grad_norm = self._clip()
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(torch.stack(losses).sum(), grad_norm)

    def state(self) -> State:
        """See Engine.state. Weights and moments are DTensors over the mesh."""
        named = dict(self._model.named_parameters())
        optimizer = {name: self._optimizer.state[parameter] for name, parameter in named.items()}
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "opt": {"state": optimizer},
        }

    def state_loaded(self) -> None:
        """See Engine.state_loaded. Nothing is derived: layers gather the shards as they are used."""

    def weights(self) -> dict[str, Tensor]:
        """See Engine.weights. Gathers one parameter at a time."""
        kept = {}
        for name, parameter in self._model.named_parameters():
            whole = cast("DTensor", parameter.detach()).full_tensor()
            if self._is_primary:
                kept[name] = whole.cpu()
        return kept

    def _clip(self) -> Tensor:
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        total = cast("DTensor", norm).full_tensor()
        clip_grads_with_norm_(self._model.parameters(), self._config.optim.clip_norm, total, foreach=True)
        return total
