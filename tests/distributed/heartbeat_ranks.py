"""The launcher and the ranks of test_heartbeat.py, whose troubles begin in step 3 of the first round.

    python -m distributed.heartbeat_ranks launch --checkpoint.uri=...     a launcher with short waits
    python -m distributed.heartbeat_ranks script COMMAND ...              the same for somebody's command
    python -m distributed.heartbeat_ranks --checkpoint.uri=...            a rank, as the launcher starts it

TROUBLE in the environment names the function that rank TROUBLED runs; in later rounds too with TROUBLE_ROUNDS above 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock_trainer.heartbeat import Heart
from penstock_trainer.launch import launch_script, launch_trainer
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.watch import Timing

STEPS = 6
HUNG_SECONDS = 2.0
TIMING = Timing(
    join_seconds=30.0,
    save_seconds=3.0,
    peer_seconds=3.0,
    beat_seconds=0.2,
    silence_seconds=20.0,
    poll_seconds=0.1,
    hung_seconds=HUNG_SECONDS,
)


def stop(heart: Heart) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def load_without_end(heart: Heart) -> None:
    """As a loader does that looks for a sample which there is not."""
    while True:
        pass


def be_slow(heart: Heart) -> None:
    """Slower than the launcher's patience in all, and never in one step."""
    for step in range(3, 6):
        heart.beat("training", step)
        time.sleep(0.4 * HUNG_SECONDS)


def save_for_long(heart: Heart) -> None:
    heart.beat("saving", 3)
    time.sleep(HUNG_SECONDS * 2)


def write_nonsense(heart: Heart) -> None:
    Path(os.environ["PENSTOCK_HEARTBEAT_FILE"]).write_bytes(b"no pulse at all" * 100)
    time.sleep(HUNG_SECONDS * 2)


def wait_to_be_stopped(heart: Heart) -> None:
    for beat in range(10):
        if beat == 5:
            sys.stdout.write(f"pid {os.getpid()}\n")
            sys.stdout.flush()
        heart.beat("training", 3)
        time.sleep(0.1)


def train(env: RankEnv) -> None:
    """Each step is a beat, its data, another beat, and a collective if there is anybody to wait for."""
    heart = Heart(env.heartbeat_file)
    heart.beat("starting", 0)
    wait, leave = join(env) if env.world_size > 1 else (nobody, nobody)
    is_troubled = (
        int(os.environ["PENSTOCK_RESTART"]) < int(os.environ.get("TROUBLE_ROUNDS", "1"))
        and str(env.rank) == os.environ["TROUBLED"]
    )
    for step in range(1, STEPS + 1):
        heart.beat("training", step)
        if is_troubled and step == 3:
            globals()[os.environ["TROUBLE"]](heart)
        heart.beat("training", step)
        wait()
    leave()
    assert env.result_file is not None
    env.result_file.write_text('{"outcome": "done"}')


def nobody() -> None:
    """To wait for, and to leave."""


def join(env: RankEnv) -> tuple[Callable[[], object], Callable[[], None]]:
    """A real collective over all ranks, which waits for longer than any test does; and the end of their group."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    assert env.master_addr is not None
    assert env.master_port is not None
    assert env.owner is not None
    store = TCPStore(env.master_addr, env.master_port, is_master=False)
    dist.init_process_group(
        "gloo", store=PrefixStore(env.owner.attempt, store), rank=env.rank, world_size=env.world_size
    )
    tensor = torch.ones(1)
    return lambda: dist.all_reduce(tensor), dist.destroy_process_group


def main(argv: list[str]) -> int:
    if argv[0] in ("launch", "script"):
        logging.basicConfig(level=logging.INFO)
    if argv[0] == "launch":
        import torch  # noqa: F401  # or it would be imported, and nobody looked at, while the first ranks run

        return launch_trainer(argv[1:], os.environ, rank_module="distributed.heartbeat_ranks", timing=TIMING)
    if argv[0] == "script":
        return launch_script(argv[1:], os.environ, timing=TIMING)
    train(RankEnv.from_environ(os.environ))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
