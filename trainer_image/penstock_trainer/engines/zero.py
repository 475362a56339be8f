"""DeepSpeed ZeRO: stage 1 shards optimizer state, stage 2 gradients too, stage 3 parameters too."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.deepspeed import bucket_elements, merged
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines.blocks import prepare_blocks
from penstock_trainer.engines.engine import State, StepResult
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.engines.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE
from penstock_trainer.model.buffers import persistent_buffers
from penstock_trainer.model.objective import Batch, Objective
from penstock_trainer.observe.clock import Clock
from penstock_trainer.optim import build_optimizer, materialize_state, set_learning_rate, state_keys
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


class ZeroEngine:
    """See Engine. DeepSpeed reduces the gradients of every micro-batch from stage 2 on: no rank keeps those of the
    whole model."""

    def __init__(
        self, objective: Objective, config: JobConfig, batch: BatchPlan, world: World, clock: Clock
    ) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        # On CPU, initialize would compile this op, for minutes and under a lock file that outlives a killed build; it
        # serves inference only.
        compatible_ops["deepspeed_shm_comm"] = False
        os.environ.setdefault(
            "LOCAL_RANK", str(world.env.local_rank)
        )  # DeepSpeed reads it; a lone process has none
        engine = config.engine
        prepare_blocks(objective.model, engine)
        model = objective.model
        is_narrow = engine.precision != "fp32"
        masters = (
            {name: weight.detach().clone() for name, weight in model.named_parameters()} if is_narrow else {}
        )
        optimizer = build_optimizer(model.parameters(), config.optim)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=objective,
            optimizer=optimizer,
            config=_deepspeed_config(config, batch, world),
            dist_init_required=False,
        )
        self._world = world
        self._batch = batch
        self._clock = clock
        self._is_stage_3 = engine.strategy == "zero3"
        self._state_keys = state_keys(config.optim)
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._inner = optimizer
        self._masters = _masters_of(self._optimizer)
        self._materialize(config)
        # DeepSpeed made its masters from weights that it had narrowed before.
        for name, master in masters.items():
            if self._parameters[name].requires_grad:
                safe_set_full_fp32_param(self._parameters[name], master.to(world.device))

    def train_step(self, batches: Sequence[Batch], *, num_targets: int, learning_rate: float) -> StepResult:
        """See Engine.train_step. DeepSpeed counts the micro-batches and steps with the last."""
        set_learning_rate(self._inner, learning_rate)
        # DeepSpeed averages over micro-batches and ranks; their sum belongs to the mean over all targets.
        factor = self._world.env.world_size * self._batch.accumulation
        losses = []
        for batch in batches:
            with self._clock.span("forward"):
                loss = self._engine(batch).sum() / num_targets
            with self._clock.span("backward"):
                self._engine.backward(loss * factor)
            with self._clock.span("optimizer"):
                self._engine.step()
            losses.append(loss.detach())
        return StepResult(torch.stack(losses).sum(), self._engine.get_global_grad_norm())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See Engine.evaluate."""
        self._engine.eval()
        try:
            return cast("Tensor", self._engine(batch))
        finally:
            self._engine.train()

    def state(self) -> State:
        """See Engine.state. Each rank names only the parameters of which its partition holds a part."""
        weights = persistent_buffers(self._model)
        moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                weights[name] = self._frozen(parameter)
                continue
            for start, shape, flat, state in self._parts(parameter):
                weights[name] = FlatShard(flat, shape=shape, start=start)
                moments[name] = {
                    key: value if key == "step" else FlatShard(value, shape=shape, start=start)
                    for key, value in state.items()
                }
        told: State = {"model": weights, "opt": {"state": moments}}
        if self._engine.fp16_enabled():
            told["loss_scale"] = self._loss_scale = _scale_of(self._optimizer.loss_scaler)
        return told

    def state_loaded(self) -> None:
        """See Engine.state_loaded. Masters were loaded; the weights that the model computes with follow from them."""
        if self._is_stage_3:
            for group in range(len(self._optimizer.fp16_groups)):
                self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
            persistent = self._optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
        else:
            self._optimizer.update_lp_params()
        if self._engine.fp16_enabled():
            _set_scale(self._optimizer.loss_scaler, self._loss_scale)

    def weights(self) -> dict[str, Tensor]:
        """See Engine.weights. Gathers one parameter's master at a time."""
        kept = {}
        for name, parameter in self._parameters.items():
            whole = (
                safe_get_full_fp32_param(parameter) if parameter.requires_grad else self._frozen(parameter)
            )
            if self._world.env.is_primary:
                kept[name] = whole.float().cpu()
        if self._world.env.is_primary:
            kept |= {name: buffer.cpu() for name, buffer in persistent_buffers(self._model).items()}
        return kept

    def _materialize(self, config: JobConfig) -> None:
        """Stage 3 hands the inner optimizer its masters only while it steps; the other stages leave them there."""
        groups = [list(group["params"]) for group in self._inner.param_groups]
        if self._is_stage_3:
            self._inner.param_groups[0]["params"] = self._masters
            for group in self._inner.param_groups[1:]:
                group["params"] = []
        materialize_state(self._inner, config.optim)
        for group, parameters in zip(self._inner.param_groups, groups, strict=True):
            group["params"] = parameters

    def _parts(self, parameter: Any) -> Iterator[tuple[int, torch.Size, Tensor, dict[str, Tensor]]]:
        """(start, whole shape, flat master, its optimizer state) of what this rank holds of a parameter: one or none."""
        if self._is_stage_3:
            size = parameter.ds_tensor.ds_numel
            start = size * parameter.ds_process_group.rank()
            numel = min(size, parameter.ds_numel - start)  # the last partition is padded
            if numel <= 0:
                return
            group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            master = self._masters[group]
            shape = parameter.ds_shape
        else:
            part = parameter._hp_mapping
            if part is None:
                return
            master = self._masters[part.param_group_index]
            offset, numel = part.hp_fragment_address.start, part.hp_fragment_address.numel
            start, shape = part.lp_fragment_address.start, parameter.shape
        state = self._inner.state[master]
        flat = {key: state[key].narrow(0, offset, numel) for key in self._state_keys}
        if "step" in state:
            flat["step"] = state["step"]
        yield start, shape, master.detach().narrow(0, offset, numel), flat

    def _frozen(self, parameter: Any) -> Tensor:
        """A parameter that is not trained, whole; stage 3 gathers it."""
        if not self._is_stage_3:
            return parameter.detach()  # type: ignore[no-any-return]
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()  # type: ignore[no-any-return]


def _masters_of(optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 masters, by the name under which each of DeepSpeed's optimizers has them.

    Stage 3; stages 1 and 2; and stage 1 in bf16, whose optimizer is another.
    """
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))


def _deepspeed_config(config: JobConfig, batch: BatchPlan, world: World) -> dict[str, Any]:
    engine = config.engine
    zero: dict[str, Any] = {
        "stage": int(engine.strategy.removeprefix("zero")),
        "reduce_bucket_size": bucket_elements(engine),
        "overlap_comm": world.device.type == "cuda",
    }
    if engine.strategy != "zero3":
        zero["allgather_bucket_size"] = bucket_elements(engine)
    if engine.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    base = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.optim.clip_norm,
        "zero_allow_untested_optimizer": True,  # torch's own; DeepSpeed's list does not have its fused form
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": engine.precision == "bf16"},
        "fp16": {
            "enabled": engine.precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": int(INITIAL_SCALE).bit_length() - 1,
            "loss_scale_window": GROWTH_INTERVAL,
            "hysteresis": 1,
        },
        "communication_data_type": engine.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    told, reasons = merged(base, engine.deepspeed)
    for reason in reasons:
        logger.info("%s", reason)
    return told


def _scale_of(scaler: Any) -> dict[str, Tensor]:
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {"scale": torch.tensor(float(scaler.cur_scale)), "good_steps": torch.tensor(float(good_steps))}


def _set_scale(scaler: Any, told: dict[str, Tensor]) -> None:
    scaler.cur_scale = float(told["scale"])
    scaler.cur_iter, scaler.last_overflow_iter = int(told["good_steps"]), -1
