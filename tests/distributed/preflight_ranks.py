"""What each rank of test_preflight.py does: `python -m distributed.preflight_ranks FUNCTION`; three ranks on two nodes.

It prints what it found, or the error, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, replace

from penstock_trainer.errors import PreflightError
from penstock_trainer.preflight import NodeFacts, check, gather_answers
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World, is_lost_peer

# Node 0 has ranks 0 and 1, node 1 has rank 2.
_NODES = {0: (0, 0, 2), 1: (0, 1, 2), 2: (1, 0, 1)}
TIMEOUT_SECONDS = 3.0


def runs(world: World, facts: NodeFacts) -> None:
    check(world, facts=facts)  # the second's answers are not those of the first
    started = time.perf_counter()
    told = asdict(check(world, facts=facts))
    say(told | {"seconds": time.perf_counter() - started})


def other_version_on_node_1(world: World, facts: NodeFacts) -> None:
    version = "2.12.0" if facts.hostname == "host-1" else "2.13.0"
    check(world, facts=replace(facts, torch_version=version))


def rank_1_never_comes(world: World, facts: NodeFacts) -> None:
    if world.env.rank == 1:
        time.sleep(2 * TIMEOUT_SECONDS)
        return
    check(world, facts=facts, answer_seconds=TIMEOUT_SECONDS)


def rank_2_answers_and_hangs(world: World, facts: NodeFacts) -> None:
    if world.env.rank == 2:
        gather_answers(world, facts, timeout_seconds=TIMEOUT_SECONDS)
        time.sleep(3 * TIMEOUT_SECONDS)
        return
    check(world, facts=facts, answer_seconds=TIMEOUT_SECONDS)


def say(told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    env = RankEnv.from_environ(os.environ)
    node, local_rank, local_world_size = _NODES[env.rank]
    env = replace(env, local_rank=local_rank, local_world_size=local_world_size)
    with World.join(env, timeout_seconds=30) as world:
        facts = replace(NodeFacts.of(world.device), hostname=f"host-{node}")
        try:
            globals()[sys.argv[1]](world, facts)
        except PreflightError as exc:
            say({"error": str(exc), "lost_peer": is_lost_peer(exc)})


if __name__ == "__main__":
    main()
