"""One rank of test_planner.py: engines that train, with what they hold and send counted. Started by run_ranks.

    python -m distributed.planner_ranks <file with [{"name": ..., "config": <JobConfig>, "vocab_size": ...}, ...]>

Each rank prints a line for each scenario:

    {"name", "states": {"parameters", "masters", "gradients", "optimizer", "buffers"}, "held", "peak",
     "collectives": [[operation, ranks of the group, calls, bytes], ...]}
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.counted import Counted
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.fields import parse_json
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.engines import build_engine
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import Objective
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

# DDP orders its buckets anew after the first step; ZeRO-3 prefetches from the third on.
WARM_UP_STEPS = {"ddp": 2, "zero3": 3}


class Rank:
    """An engine on the built-in decoder, and a look at what it holds."""

    def __init__(self, config: JobConfig, vocab_size: int, world: World) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._plan = BatchPlan.of(config, world.env.world_size)
        model = Decoder(config.model, vocab_size)
        model.initialize(config.seed)
        objective = Objective(model, chunk_tokens=config.engine.loss_chunk_tokens)
        self.engine: Any = build_engine(objective, config, self._plan, world)
        self.gradients = 0
        """Bytes when the optimizer last stepped."""
        step = self.engine._optimizer.step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            self.gradients = _bytes(self._gradients())
            return step(*args, **kwargs)

        self.engine._optimizer.step = counted_step

    def train_step(self) -> None:
        length = self._config.data.seq_len
        tokens = torch.randint(self._vocab_size, (self._plan.per_rank, length + 1))
        batches = [
            {"input_ids": micro[:, :-1], "labels": micro[:, 1:]}
            for micro in torch.split(tokens, self._plan.micro_batch)
        ]
        self.engine.train_step(batches, num_targets=self._config.global_batch * length, learning_rate=1e-3)

    def states(self) -> dict[str, int]:
        """From the live tensors, wherever the engine has them."""
        inner = self.engine._inner if self._is_zero else self.engine._optimizer
        told = {
            "optimizer": _bytes(value for state in inner.state.values() for value in state.values()),
            "gradients": self.gradients,
        }
        if not self._is_zero:
            return {"parameters": _bytes(self.engine._model.parameters()), "masters": 0, "buffers": 0, **told}
        return {**self._of_zero_3(), **told} if self._is_stage_3 else {**self._of_zero_1_and_2(), **told}

    @property
    def _is_zero(self) -> bool:
        return self._config.engine.strategy.startswith("zero")

    @property
    def _is_stage_3(self) -> bool:
        return self._config.engine.strategy == "zero3"

    def _of_zero_1_and_2(self) -> dict[str, int]:
        optimizer = self.engine._optimizer
        names = ("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
        buffers = [
            *(getattr(optimizer, name, None) for name in names),
            *getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", []),
            *getattr(optimizer, "accumulated_grads_in_cpu", {}).values(),
        ]
        return {
            "parameters": _bytes(self.engine._model.parameters()),
            "masters": _bytes(self.engine._masters),
            "buffers": _bytes(buffers),
        }

    def _of_zero_3(self) -> dict[str, int]:
        optimizer = self.engine._optimizer
        parameters = list(self.engine._model.parameters())
        whole = [parameter for parameter in parameters if parameter.ds_persist]
        return {
            "parameters": _bytes([*(parameter.ds_tensor for parameter in parameters), *whole]),
            "masters": _bytes(optimizer.fp32_partitioned_groups_flat),
            "buffers": _bytes(bucket.buffer for bucket in optimizer.ipg_buckets.values()),
        }

    def _gradients(self) -> list[Tensor | None]:
        optimizer = self.engine._optimizer
        if not self._is_zero:
            return [parameter.grad for parameter in self.engine._trained]
        if self._is_stage_3:
            masters = optimizer.fp32_partitioned_groups_flat
            return [optimizer.grad_partitions_flat_buffer, *(master.grad for master in masters)]
        if hasattr(optimizer, "fp32_groups_gradients_flat"):
            return list(optimizer.fp32_groups_gradients_flat)
        if optimizer.cpu_offload:
            return [master.grad for master in optimizer.single_partition_of_fp32_groups]
        return [part for parts in optimizer.averaged_gradients.values() for part in parts or ()]


def count(scenario: dict[str, Any], world: World) -> dict[str, Any]:
    config = parse_json(JobConfig, scenario["config"], "the config")
    with Counted() as counted:
        rank = Rank(config, scenario["vocab_size"], world)
        for _ in range(WARM_UP_STEPS.get(config.engine.strategy, 1)):
            rank.train_step()
        gc.collect()
        held = counted.now
        with counted.counting():
            rank.train_step()
    calls: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for operation, ranks, size in counted.collectives:
        calls[operation, ranks][0] += 1
        calls[operation, ranks][1] += size
    return {
        "name": scenario["name"],
        "states": rank.states(),
        "held": held,
        "peak": counted.peak,
        "collectives": [[*key, *numbers] for key, numbers in calls.items() if key[1] > 1],
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the storages behind them, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    with World.join(RankEnv.from_environ(os.environ), timeout_seconds=60) as world:
        for scenario in json.loads(Path(sys.argv[1]).read_text()):
            sys.stdout.write(json.dumps(count(scenario, world)) + "\n")
            gc.collect()


if __name__ == "__main__":
    main()
