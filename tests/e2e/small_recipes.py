"""Recipes small enough for tests; the same code paths as the real ones. Compiles them as a program too."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.resources import Resources
from penstock_pipelines.compile import compile_recipe
from penstock_pipelines.recipe import Recipe
from penstock_pipelines.settings import Settings, load_settings
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)

STEPS = 64
INTERVAL = 8


def small(strategy: Strategy, *, reducers: bool) -> Recipe:
    node = MachineSpec(machine_type="g2-standard-12", accelerator_type="NVIDIA_L4", accelerator_count=1)
    server = ReductionServer(replica_count=2) if reducers else None
    return Recipe(
        name=f"small-{strategy}",
        description="for tests",
        config=JobConfig(
            model=ModelConfig(dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=128),
            data=DataConfig(seq_len=64),
            optim=OptimConfig(warmup_steps=5),
            engine=EngineConfig(strategy=strategy),
            checkpoint=CheckpointConfig(interval=INTERVAL),
            steps=STEPS,
            global_batch=8,
            max_micro_batch=2,
            log_interval=1,
        ),
        resources=Resources(machine=node, num_nodes=2, reduction_server=server),
        vocab_size=512,
        eval_fraction=0.1,
    )


def compile_small(settings: Settings, directory: Path) -> dict[str, Path]:
    """Compiled files by strategy: FSDP with two pools, ZeRO-2 with a third of two reducers."""
    recipes = {"fsdp-full": small("fsdp-full", reducers=False), "zero2": small("zero2", reducers=True)}
    paths = {}
    for strategy, recipe in recipes.items():
        paths[strategy] = directory / f"{recipe.name}.yaml"
        compile_recipe(recipe, settings.images, paths[strategy], location=settings.location, allow_tags=True)
    return paths


if __name__ == "__main__":
    compile_small(load_settings(Path(sys.argv[1])), Path(sys.argv[2]))
