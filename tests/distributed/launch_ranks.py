"""What the ranks of test_launch.py and test_restart.py do: `python -m distributed.launch_ranks`, with LAUNCH_RANKS naming the function.

They report as the trainer does, through PENSTOCK_RESULT_FILE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ["RANK"])
RESTART = int(os.environ["PENSTOCK_RESTART"])
TOLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "PENSTOCK_ATTEMPT",
    "PENSTOCK_FENCING_TOKEN",
)


def report(outcome: str, *, error: str = "", trace: str = "", step: int | None = None) -> None:
    told = {"outcome": outcome, "step": step, "error": error, "traceback": trace}
    Path(os.environ["PENSTOCK_RESULT_FILE"]).write_text(json.dumps(told))


def tell_round() -> None:
    """What this round's ranks are told, and that they reach each other."""
    told = (
        *("RANK", "MASTER_PORT", "PENSTOCK_RESTART", "PENSTOCK_ATTEMPT", "PENSTOCK_FENCING_TOKEN"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    )
    seen = {name: os.environ.get(name) for name in told}
    say("round " + json.dumps(seen | {"sum": reduce_ranks()}))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def reduce_ranks() -> float:
    """A real all_reduce: the sum of all rank + 1."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        _init_process_group()
    tensor = torch.tensor([RANK + 1.0])
    dist.all_reduce(tensor)
    return float(tensor.item())


def _init_process_group() -> None:
    """As the trainer does where the launcher minted an attempt, and with stock env:// elsewhere."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    attempt = os.environ.get("PENSTOCK_ATTEMPT")
    if attempt is None:
        dist.init_process_group("gloo")
        return
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo", store=PrefixStore(attempt, store), rank=RANK, world_size=int(os.environ["WORLD_SIZE"])
    )


def leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def reduce() -> None:
    seen = {name: os.environ.get(name) for name in TOLD} | {"sum": reduce_ranks()}
    say("seen " + json.dumps(seen))
    leave()
    report("done")


def script() -> None:
    """Somebody's script, which knows nothing of reports."""
    say(f"sum {reduce_ranks()} local {os.environ['LOCAL_RANK']}")
    leave()


def quick() -> None:
    report("done")


def raise_on_rank_1() -> None:
    """Rank 1 has an error of its own; what rank 0 sees is a broken connection."""
    _lose_rank_1(_fail)


def kill_rank_1() -> None:
    _lose_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exit_on_rank_1() -> None:
    _lose_rank_1(lambda: os._exit(3))


def kill_rank_1_once() -> None:
    tell_round()
    if RESTART == 0:
        kill_rank_1()
    leave()
    report("done")


def replaced_and_killed() -> None:
    """A successor takes the checkpoint root over, and then rank 1 is lost."""
    from penstock_trainer.checkpoints.ownership import take_ownership
    from penstock_trainer.contract.config import parse_args
    from penstock_trainer.storage import storage_for

    root_uri = parse_args(sys.argv[1:]).checkpoint.root_uri("")
    if RANK == 1:
        take_ownership(root_uri, storage_for(root_uri))
    kill_rank_1()


def script_killed_once() -> None:
    _lose_script_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL), rounds=1)


def script_exits_once() -> None:
    _lose_script_rank_1(lambda: os._exit(3), rounds=1)


def script_exits_always() -> None:
    _lose_script_rank_1(lambda: os._exit(3), rounds=100)


def script_counts() -> None:
    """Goes on after the newest step in the directory of its first argument; rank 1 dies after step 3 if it began at 0."""
    directory = Path(sys.argv[1])
    begin = max((int(path.suffix[1:]) for path in directory.glob("state.*")), default=0)
    say(f"begins at {begin}")
    for step in range(begin + 1, 7):
        total = reduce_ranks()
        writing = directory.with_name(f"{directory.name}.writing")
        writing.write_text(f"{total} at {step}")
        writing.rename(directory / f"state.{step}")
        if (begin, step, RANK) == (0, 3, 1):
            os.kill(os.getpid(), signal.SIGKILL)
    leave()


def script_waits() -> None:
    tell_round()
    time.sleep(600)


def _lose_script_rank_1(end: Callable[[], None], *, rounds: int) -> None:
    """Rank 0 has no report to write: it ends with the traceback of its broken collective."""
    tell_round()
    if rounds > RESTART:
        if RANK == 1:
            end()
        reduce_ranks()
    leave()


def _lose_rank_1(end: Callable[[], None]) -> None:
    reduce_ranks()
    if RANK == 1:
        end()
    try:
        reduce_ranks()
    except RuntimeError as exc:
        report("retryable", error=f"collective failed: {exc}", step=3)
        raise SystemExit(1) from exc


def _fail() -> None:
    try:
        raise ValueError("the loss is nan")
    except ValueError as exc:
        report("failed", error=str(exc), trace=traceback.format_exc(), step=3)
        raise SystemExit(1) from exc


def save_on_sigterm() -> None:
    """Leaves on SIGTERM with state saved. The helper is what a data loader would have started."""

    def save(_number: int, _frame: object) -> None:
        report("preempted", step=7)
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    _wait()


def save_until_the_second_sigterm() -> None:
    """As a script that leaves the second SIGTERM to the system, so that an impatient person can end it."""

    def save(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say("saving")
        time.sleep(1.0)
        report("preempted", step=7)
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    _wait()


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait()


def _wait() -> None:
    helper = os.fork()
    if helper != 0:
        say(f"waiting {os.getpid()} {helper}")
    time.sleep(600)


if __name__ == "__main__":
    globals()[os.environ["LAUNCH_RANKS"]]()
