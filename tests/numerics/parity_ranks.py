"""One rank of the parity tests: engines alone, on token ids drawn from a seed. Started by run_ranks.

    python -m numerics.parity_ranks '[{"name": ..., "config": <JobConfig>, "steps": 10, "start": <path or null>,
      "gradients": <path or null>}]'

For each scenario rank 0 prints one line with the losses in full precision, and stores the first weights and the gradients
of the first step where a path is given.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from numerics.parity_run import SEQ_LEN, VOCAB_SIZE, micro_batches
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.fields import parse_json
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines import build_engine
from penstock_trainer.engines.engine import Engine
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Objective
from penstock_trainer.optim import learning_rate
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World


def run(scenario: dict[str, Any], world: World) -> None:
    config = parse_json(JobConfig, scenario["config"], "the config")
    plan = BatchPlan.of(config, world.env.world_size)
    model = Decoder(config.model, VOCAB_SIZE)
    model.initialize(config.seed)
    objective = Objective(model, chunk_tokens=config.engine.loss_chunk_tokens)
    engine = build_engine(objective, config, plan, world)
    if scenario["start"]:
        weights = engine.weights()
        if world.env.is_primary:
            torch.save(weights, Path(scenario["start"]))
    losses, norms = [], []
    for step in range(scenario["steps"]):
        result = engine.train_step(
            micro_batches(config, step, world.env.rank, plan),
            num_targets=config.global_batch * SEQ_LEN,
            learning_rate=learning_rate(config.optim, step, config.steps, global_batch=config.global_batch),
        )
        loss = result.loss.clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(float(result.grad_norm))
        if step == 0 and scenario["gradients"]:
            gradients = first_gradients(engine, world)
            if world.env.is_primary:
                torch.save(gradients, Path(scenario["gradients"]))
    if world.env.is_primary:
        print(json.dumps({"name": scenario["name"], "losses": losses, "norms": norms}), flush=True)


def first_gradients(engine: Engine, world: World) -> dict[str, Tensor]:
    """Of SGD, whose momentum after one step is the gradient itself."""
    states = engine.state()["opt"]["state"]
    names = sorted({name for told in world.gather(list(states)) for name in told})
    return {name: whole(states.get(name, {}).get("momentum_buffer"), world) for name in names}


def whole(tensor: Tensor | None, world: World) -> Tensor:
    """Put together what the ranks hold of a tensor; every rank gets it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    part = (tensor._start, tensor._flat.clone(), tensor.shape) if isinstance(tensor, FlatShard) else None
    parts = sorted((told for told in world.gather(part) if told), key=lambda told: told[0])
    if not parts:
        assert tensor is not None
        return tensor
    return torch.cat([flat for _, flat, _ in parts]).view(parts[0][2])


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING)
    with World.join(RankEnv.from_environ(os.environ), timeout_seconds=60) as world:
        for scenario in json.loads(sys.argv[1]):
            run(scenario, world)


if __name__ == "__main__":
    main()
