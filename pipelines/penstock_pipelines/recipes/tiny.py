"""A 1.3 M parameter decoder, small enough for a laptop: two nodes, two thousand tokens a step.

Verified on 2 CPU cores through the stand-in. The machine types are what the same YAML asks of Vertex AI, where it was
not tried.
"""

from __future__ import annotations

from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.resources import Resources
from penstock_pipelines.recipe import Recipe
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)

_NODE = "g2-standard-12"
"""One NVIDIA L4."""


def tiny_zero2() -> Recipe:
    """DeepSpeed ZeRO-2 on two nodes with a Reduction Server pool, to show the three pools at work."""
    return Recipe(
        name="tiny-zero2",
        description="1.3 M parameter decoder, DeepSpeed ZeRO-2 on 2 nodes, with a Reduction Server pool",
        config=_config("zero2"),
        resources=Resources(machine=_NODE, num_nodes=2, reduction_server=ReductionServer(replica_count=1)),
        vocab_size=1024,
    )


def tiny_fsdp() -> Recipe:
    """Torch FSDP2 on two nodes: a primary and one worker."""
    return Recipe(
        name="tiny-fsdp",
        description="1.3 M parameter decoder, torch FSDP2 on 2 nodes",
        config=_config("fsdp-full"),
        resources=Resources(machine=_NODE, num_nodes=2),
        vocab_size=1024,
    )


def _config(strategy: Strategy) -> JobConfig:
    return JobConfig(
        model=ModelConfig(dim=160, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=432),
        data=DataConfig(seq_len=128),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=15),
        engine=EngineConfig(strategy=strategy),
        checkpoint=CheckpointConfig(interval=25),
        evaluation=EvaluationConfig(interval=50),
        steps=150,
        global_batch=16,
        max_micro_batch=16,
    )
