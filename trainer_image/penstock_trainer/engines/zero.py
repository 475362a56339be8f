"""DeepSpeed ZeRO: stage 2 shards gradients and optimizer state and keeps working weights whole on every rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.data import BatchPlan
from penstock_trainer.engines.engine import State, StepResult
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.model.decoder import Decoder, next_token_loss
from penstock_trainer.optim import STATE_KEYS, build_adamw, materialize_state, set_learning_rate
from penstock_trainer.world import World


class Zero2Engine:
    """See Engine. DeepSpeed reduces the gradients of every micro-batch: no rank keeps those of the whole model."""

    def __init__(self, model: Decoder, config: JobConfig, batch: BatchPlan, world: World) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        # On CPU, initialize would compile this op, for minutes and under a lock file that outlives a killed build; it
        # serves inference only.
        compatible_ops["deepspeed_shm_comm"] = False
        os.environ.setdefault(
            "LOCAL_RANK", str(world.env.local_rank)
        )  # DeepSpeed reads it; a lone process has none
        is_bf16 = config.engine.precision == "bf16"
        masters = (
            {name: weight.detach().clone() for name, weight in model.named_parameters()} if is_bf16 else {}
        )
        optimizer = build_adamw(model.parameters(), config.optim)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=_deepspeed_config(config, batch, world),
            dist_init_required=False,
        )
        self._is_primary = world.env.is_primary
        self._parameters = dict(self._engine.module.named_parameters())
        self._adamw = optimizer
        materialize_state(optimizer)
        self._optimizer._lazy_init_hp_params_optimizer_state()
        # DeepSpeed made its masters from weights that it had cast to bf16 before.
        for name, master in masters.items():
            safe_set_full_fp32_param(self._parameters[name], master.to(world.device))

    def train_step(self, tokens: Tensor, *, learning_rate: float) -> StepResult:
        """See Engine.train_step. DeepSpeed counts the micro-batches and steps with the last."""
        set_learning_rate(self._adamw, learning_rate)
        losses = []
        for micro in tokens:
            loss = next_token_loss(self._engine(micro[:, :-1]), micro[:, 1:])
            self._engine.backward(loss)  # divides by the accumulation
            self._engine.step()
            losses.append(loss.detach())
        return StepResult(torch.stack(losses).mean(), self._engine.get_global_grad_norm())

    def state(self) -> State:
        """See Engine.state. Each rank names only the parameters of which its partition holds a part."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            part = parameter._hp_mapping
            if part is None:
                continue
            weights[name] = _shard(parameter, part.hp_fragment)
            step = self._adamw.state[self._optimizer.single_partition_of_fp32_groups[part.param_group_index]]
            moments[name] = {
                "step": step["step"],
                **{key: _shard(parameter, part.get_hp_fragment(key)) for key in STATE_KEYS},
            }
        return {"model": weights, "opt": {"state": moments}}

    def state_loaded(self) -> None:
        """See Engine.state_loaded. Masters were loaded; the weights that the model computes with follow from them."""
        self._optimizer.update_lp_params()

    def weights(self) -> dict[str, Tensor]:
        """See Engine.weights. Gathers one parameter's master at a time."""
        kept = {}
        for name, parameter in self._parameters.items():
            whole = safe_get_full_fp32_param(parameter)
            if self._is_primary:
                kept[name] = whole.cpu()
        return kept


def _deepspeed_config(config: JobConfig, batch: BatchPlan, world: World) -> dict[str, Any]:
    # Gradients are reduced in fp32. DeepSpeed wants an even number of elements.
    bucket_elements = max(2, config.engine.bucket_bytes // 4 // 2 * 2)
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.optim.clip_norm,
        "zero_allow_untested_optimizer": True,  # our own AdamW; it is not in DeepSpeed's list in its fused form
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
            "overlap_comm": world.device.type == "cuda",
        },
        "bf16": {"enabled": config.engine.precision == "bf16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }


def _shard(parameter: Any, fragment: Tensor) -> FlatShard:
    start = parameter._hp_mapping.lp_fragment_address.start
    return FlatShard(fragment, shape=parameter.shape, start=start)
