"""What a job's own arguments say about the program that it runs, where that is our trainer."""

from __future__ import annotations

import json

from penstock_components.jobs.messages import CustomJobSpec
from penstock_trainer.contract.config import EngineConfig

_CONFIG = "--config="


def strategy_of(spec: CustomJobSpec) -> str:
    """`engine.strategy` in the trainer's --config of the primary; "" for any other program."""
    container = spec.worker_pool_specs[0].container_spec if spec.worker_pool_specs else None
    if container is None or "penstock_trainer" not in container.command:
        return ""
    texts = [word.removeprefix(_CONFIG) for word in container.args if word.startswith(_CONFIG)]
    if not texts:
        return ""
    try:
        config = json.loads(texts[0])
        return str(config.get("engine", {}).get("strategy", EngineConfig().strategy))
    except (ValueError, AttributeError):
        return ""
