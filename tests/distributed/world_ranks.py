"""What each rank of test_world.py does; it prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

from penstock_trainer import agreement
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World


def caught(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def fail(error: Exception) -> None:
    raise error


def main() -> None:
    env = RankEnv.from_environ(os.environ)
    preemption = Preemption()
    with preemption.watch(), World.join(env, timeout_seconds=30) as world:
        seen: dict[str, object] = {
            "value": world.from_primary(lambda: {"from": env.rank}),
            "gathered": world.gather(10 * env.rank),
            "primary": caught(lambda: world.from_primary(lambda: fail(ValueError("no\nsecond line")))),
            "node": caught(lambda: world.once_per_node(lambda: fail(OSError("disk full")))),
        }
        stops = [agreement.ask(world.control, preemption.is_told, False).wait()]
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stops.append(agreement.ask(world.control, preemption.is_told, env.rank == 0).wait())
        sys.stdout.write(json.dumps({**seen, "stops": stops}))


if __name__ == "__main__":
    main()
