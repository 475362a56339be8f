"""How a model is spread over the ranks: the Engine protocol, and a strategy's class by its name in the config."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

import torch

from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines.engine import Engine, EngineFactory
from penstock_trainer.errors import EngineError
from penstock_trainer.model.objective import Objective
from penstock_trainer.observe.clock import Clock, clock_for
from penstock_trainer.world import World

_TORCH = "penstock_trainer.engines.torch_mesh:TorchEngine"
_DEEPSPEED = "penstock_trainer.engines.zero:ZeroEngine"
_CLASSES: Mapping[Strategy, str] = {
    "ddp": _TORCH,
    "fsdp-full": _TORCH,
    "fsdp-hybrid": _TORCH,
    "zero1": _DEEPSPEED,
    "zero2": _DEEPSPEED,
    "zero3": _DEEPSPEED,
}


def build_engine(
    objective: Objective, config: JobConfig, batch: BatchPlan, world: World, clock: Clock | None = None
) -> Engine:
    """The engine of config.engine.strategy around an initialized model, which it takes over. Collective.

    `clock` times the parts of its steps. The engine's module is imported here: a run that does not choose DeepSpeed does
    not need it. Raises EngineError for what the device or the world size cannot do.
    """
    if config.engine.precision == "fp16" and world.device.type != "cuda":
        raise EngineError(
            f"engine.precision = 'fp16' needs a GPU, and this run is on {world.device}: fp16 has no fast path there, "
            "and its narrow range no use. Use fp32, or bf16 where the processor has it."
        )
    if config.engine.precision != "fp32" and config.engine.strategy != "ddp":  # whose autocast sees to it
        objective.input_dtype = torch.bfloat16 if config.engine.precision == "bf16" else torch.float16
    module, _, name = _CLASSES[config.engine.strategy].partition(":")
    factory = cast("EngineFactory", getattr(importlib.import_module(module), name))
    return factory(objective, config, batch, world, clock or clock_for(world.device))
