"""What each rank of the tests of checkpoints does: `python -m distributed.checkpoint_ranks BODY DIRECTORY`.

It prints what it saw as JSON. Each rank takes itself for a node of its own, but in `plans`, which does both.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distributed.tiny_run import tiny_config
from penstock_trainer.checkpoints.checkpointer import Checkpointer
from penstock_trainer.checkpoints.local_root import LocalRoot
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.restore import Restorer
from penstock_trainer.checkpoints.save_plan import plan_save
from penstock_trainer.contract.fields import to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import storage_for
from penstock_trainer.world import World

ROWS, COLUMNS = 5, 3
TOKENIZER = "ab" * 32


def state_of(world: World, value: float) -> State:
    """A tensor that every rank has, one in rows, one in rows on ranks of uneven flat ranges, and a count."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + value
    mesh = init_device_mesh("cpu", (world.env.world_size,))
    begin, end = [(0, 8), (8, 15)][world.env.rank]
    shape = torch.Size((ROWS, COLUMNS))
    return {
        "model": {
            "replicated": whole.clone(),
            "rows": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
            "flat": FlatShard(whole.flatten()[begin:end].clone(), shape=shape, start=begin),
        },
        "opt": {"state": {"replicated": {"step": torch.tensor(value)}}},
    }


def held(state: State) -> list[list[float]]:
    """What this rank has of each tensor."""
    model = state["model"]
    step = state["opt"]["state"]["replicated"]["step"]
    parts = (model["replicated"], model["rows"].to_local(), model["flat"].flat, step)
    return [part.flatten().tolist() for part in parts]


def plans(world: World, _directory: Path) -> Any:
    """Of ranks of one node, and of ranks that are nodes."""
    told = {}
    for name, ranks_per_node in (("one node", 2), ("two nodes", 1)):
        env = replace(world.env, local_rank=world.env.rank % ranks_per_node, local_world_size=ranks_per_node)
        state = state_of(world, 1.0)
        plan = plan_save(state, replace(world, env=env), per_node=True)
        buffer = torch.zeros(plan.layout.nbytes, dtype=torch.uint8)
        plan.fill(state, buffer)
        told[name] = {
            "layout": to_dict(plan.layout),
            "tensors": to_dict(plan.tensors),
            "buffer": buffer.numpy().tobytes().hex(),
        }
    return told


class Node:
    """A rank that is a node, with a disk of its own, in a run whose ranks are started again and again."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = replace(world, env=replace(world.env, local_rank=0, local_world_size=1))
        self.disk = directory / f"disk-{world.env.rank}"
        self._root_uri = (directory / "root").as_uri()
        self.config = tiny_config("file:///data", self._root_uri)

    def start(self) -> tuple[Checkpointer, Restorer, LocalRoot]:
        """Ranks that take the run over."""
        owner = self.world.from_primary(lambda: take_ownership(self._root_uri, storage_for(self._root_uri)))
        local_root = LocalRoot(str(self.disk), self._root_uri, owner)
        more: dict[str, Any] = {"tokenizer_sha256": TOKENIZER, "local_root": local_root}
        state = state_of(self.world, 0.0)
        checkpoints = Checkpointer(self._root_uri, owner, self.config, self.world, state, **more)
        return checkpoints, Restorer(self._root_uri, self.config, self.world, **more), local_root

    def save(self, **to_root: bool) -> str:
        """Save steps, such as `step_4=True` to the root too; the directory on this node's disk."""
        checkpoints, _, local_root = self.start()
        with closing(checkpoints):
            for name, is_to_root in to_root.items():
                step = int(name.removeprefix("step_"))
                state = state_of(self.world, float(step))
                checkpoints.save(Progress(step=step), state, to_root=is_to_root)
                assert checkpoints.finish()
        self.world.gather(None)  # what the other node writes may be of use to this one's root
        return str(local_root.path)

    def restored(self) -> Any:
        """(step, whether this rank's tensors are the step's)."""
        checkpoints, restorer, _ = self.start()
        with closing(checkpoints):
            state = state_of(self.world, -1.0)
            progress = restorer.restore(state)
            step = progress.step if progress else 0
            return step, held(state) == held(state_of(self.world, float(step)))


def each_on_its_own_disk(world: World, directory: Path) -> Any:
    """From the disks when both have a later save than the root."""
    node = Node(world, directory)
    path = node.save(step_4=True, step_8=False, step_12=False)
    steps = [step for step in (4, 8, 12) if Path(path, f"step-{step:08d}", "manifest.json").exists()]
    return {"steps": steps, "restored": node.restored(), "path": path}


def damaged_on_one(world: World, directory: Path) -> Any:
    """One node's newest save is damaged: the one before counts, on both."""
    node = Node(world, directory)
    path = Path(node.save(step_4=True, step_8=False, step_12=False))
    if world.env.rank == 1:
        next(path.glob("step-00000012/*/*.distcp")).write_bytes(b"")
    world.gather(None)
    return node.restored()


def new_machine(world: World, directory: Path) -> Any:
    """One node was replaced: its disk is empty, and the root is what both have."""
    node = Node(world, directory)
    node.save(step_4=True, step_8=False)
    if world.env.rank == 1:
        node.disk.rename(directory / "gone")
    world.gather(None)
    return node.restored()


def root_is_newer(world: World, directory: Path) -> Any:
    """What is in the root is preferred when the disks have nothing later."""
    node = Node(world, directory)
    node.save(step_4=False, step_8=True)
    return node.restored()


def different_saves(world: World, directory: Path) -> Any:
    """Both disks have step 8, but of two attempts: they do not belong together."""
    node = Node(world, directory)
    node.save(step_4=True, step_8=False)
    if world.env.rank == 0:
        node.disk.rename(directory / "first")
    world.gather(None)
    path = Path(node.save(step_8=False))
    if world.env.rank == 0:
        (directory / "first").rename(directory / "again")
        for old in (directory / "again").iterdir():
            path.rename(directory / "second")
            old.rename(path)
    world.gather(None)
    return node.restored()


def one_rank_cannot_store(world: World, directory: Path) -> Any:
    """Rank 1's part of step 8 cannot be written: no rank takes the step for a checkpoint, and both learn why."""
    root_uri = (directory / "root").as_uri()
    config = tiny_config("file:///data", root_uri)
    owner = world.from_primary(lambda: take_ownership(root_uri, storage_for(root_uri)))
    state = state_of(world, 4.0)
    checkpoints = Checkpointer(root_uri, owner, config, world, state, tokenizer_sha256=TOKENIZER)
    with closing(checkpoints):
        checkpoints.save(Progress(step=4), state)
        is_stored = checkpoints.finish()
        blocked = directory / f"root/step-00000008/{owner.attempt}/1-0.distcp/in-the-way"
        if world.env.is_primary:
            blocked.mkdir(parents=True)
        world.gather(None)
        checkpoints.save(Progress(step=8), state)
        try:
            checkpoints.wait(is_told_to_stop=lambda: False)
        except Exception as exc:
            return is_stored, f"{type(exc).__name__}: {exc}"
    return is_stored, ""


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    env = RankEnv.from_environ(os.environ)
    with World.join(env, timeout_seconds=60) as world:
        bodies = sys.argv[1].split(",")
        told = {body: globals()[body](world, Path(sys.argv[2]) / body) for body in bodies}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
