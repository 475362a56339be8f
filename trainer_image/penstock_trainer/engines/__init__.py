"""How a model is spread over the ranks: the Engine protocol, and a strategy's class by its name in the config."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from penstock_trainer.contract.config import JobConfig, Strategy
from penstock_trainer.data import BatchPlan
from penstock_trainer.engines.engine import Engine, EngineFactory
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.world import World

_CLASSES: Mapping[Strategy, str] = {
    "fsdp-full": "penstock_trainer.engines.fsdp:FsdpEngine",
    "zero2": "penstock_trainer.engines.zero:Zero2Engine",
}


def build_engine(model: Decoder, config: JobConfig, batch: BatchPlan, world: World) -> Engine:
    """The engine of config.engine.strategy around an initialized model, which it takes over. Collective.

    Its module is imported here: a run that does not choose DeepSpeed does not need it.
    """
    module, _, name = _CLASSES[config.engine.strategy].partition(":")
    factory = cast("EngineFactory", getattr(importlib.import_module(module), name))
    return factory(model, config, batch, world)
