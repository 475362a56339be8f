"""What cannot be built is refused before a process group does anything."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from penstock_trainer.contract.config import EngineConfig, JobConfig
from penstock_trainer.contract.fields import FieldValueError
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines import build_engine
from penstock_trainer.engines.torch_mesh import build_mesh
from penstock_trainer.errors import EngineError
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Objective
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World


def world(world_size: int, local_world_size: int = 1) -> World:
    env = RankEnv(world_size=world_size, local_world_size=local_world_size)
    return World(env=env, device=torch.device("cpu"), control=cast("Any", None))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"shard_size": 3}, "replicate_size 1 x shard_size 3 is 3 ranks, and the world has 4"),
        ({"replicate_size": 2, "shard_size": 4}, "replicate_size 2 x shard_size 4 is 8 ranks"),
        ({"replicate_size": 3}, "replicate_size 3 x shard_size 1 is 3 ranks"),
        ({"shard_size": 8}, "replicate_size 0 x shard_size 8"),
    ],
)
def test_a_mesh_that_does_not_multiply_to_the_world_size_is_refused(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        build_mesh(EngineConfig(strategy="fsdp-hybrid", **sizes), world(4))


def test_fp16_needs_a_gpu() -> None:
    config = JobConfig(engine=EngineConfig(precision="fp16"))
    objective = Objective(Decoder(config.model, 16))
    with pytest.raises(EngineError, match="'fp16' needs a GPU"):
        build_engine(objective, config, BatchPlan.of(config, 1), world(1))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"strategy": "ddp", "shard_size": 2}, "engine.shard_size"),
        ({"strategy": "fsdp-full", "replicate_size": 2}, "engine.replicate_size"),
        ({"strategy": "ddp", "cpu_offload": True}, "engine.cpu_offload"),
        ({"strategy": "zero2", "reshard_after_forward": False}, "engine.reshard_after_forward"),
        ({"strategy": "fsdp-full", "find_unused_parameters": True}, "engine.find_unused_parameters"),
        ({"strategy": "fsdp-full", "deepspeed": {"wall_clock_breakdown": True}}, "engine.deepspeed"),
        ({"strategy": "zero3", "compile": True}, "engine.compile"),
    ],
)
def test_a_setting_that_the_strategy_does_not_have_is_refused_by_name(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldValueError, match=field):
        EngineConfig(**settings)
