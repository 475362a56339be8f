"""How long a save keeps the training thread: ours, torch's own ways, and a plain copy of the bytes as the floor.

    python -m benchmarks.checkpoint_stall [ROUNDS]

prints one JSON object: seconds by way of saving, a list with one value a round. In each round ours has a new buffer, so
that its first save is measured as often as a later one; the order of floor and ours alternates.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from penstock_trainer.checkpoints.host_buffer import HostBuffer
from penstock_trainer.checkpoints.save_plan import plan_save
from penstock_trainer.engines.engine import State
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

STATE_BYTES = 512 * 2**20
_TENSORS = 48
_SCRATCH = "/dev/shm"
"""Files are memory too: no disk is measured."""


def state_of(nbytes: int) -> State:
    """Weights and AdamW's moments of as many layers as make up the bytes, fp32."""
    rows = nbytes // _TENSORS // 3 // 1024 // 4
    named = {f"layers.{number}.weight": torch.randn(rows, 1024) for number in range(_TENSORS)}
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": weight.clone(), "exp_avg_sq": weight.clone()}
        for name, weight in named.items()
    }
    return {"model": named, "opt": {"state": moments}}


def tensors_of(state: State) -> list[Tensor]:
    """All of them."""
    moments = [tensor for of_one in state["opt"]["state"].values() for tensor in of_one.values()]
    return [*state["model"].values(), *moments]


def main(rounds: int) -> None:
    """Measure, and print."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    state = state_of(STATE_BYTES)
    tensors = tensors_of(state)
    rooms = [torch.empty_like(tensor).fill_(0.0) for tensor in tensors]
    seconds: dict[str, list[float]] = defaultdict(list)

    def copy() -> None:
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor)

    def spent(name: str, work: Callable[[], object]) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        work()
        seconds[f"{name}, CPU"].append(time.thread_time() - cpu)
        seconds[f"{name}, wall"].append(time.perf_counter() - wall)

    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=60) as world:
        plan = plan_save(state, world)
        for number in range(rounds):
            buffer = HostBuffer(plan.layout.nbytes)
            first = [("first save", lambda buffer=buffer: plan.fill(state, buffer.tensor)), ("copy", copy)]
            for name, work in first if number % 2 == 0 else reversed(first):
                spent(name, work)
            spent("later save", lambda buffer=buffer: plan.fill(state, buffer.tensor))
            buffer.close()
            scratch = Path(tempfile.mkdtemp(dir=_SCRATCH))
            spent("torch.save", lambda scratch=scratch: torch.save(state, scratch / "state.pt"))
            (scratch / "state.pt").unlink()
            spent("dcp.save", lambda scratch=scratch: dcp.save(state, checkpoint_id=scratch / "dcp"))
            shutil.rmtree(scratch / "dcp")
            pending: list[dcp.state_dict_saver.AsyncSaveResponse] = []
            spent(
                "dcp.async_save",
                lambda scratch=scratch, pending=pending: pending.append(
                    dcp.async_save(state, checkpoint_id=scratch / "async", process_group=world.control)
                ),
            )
            pending[0].result()
            shutil.rmtree(scratch)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
