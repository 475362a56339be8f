"""What the ranks of test_launch.py do: `python -m distributed.launch_ranks`, with LAUNCH_RANKS naming the function.

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


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def reduce_ranks() -> float:
    """A real all_reduce in a process group that stock env:// opened: the sum of all rank + 1."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    tensor = torch.tensor([RANK + 1.0])
    dist.all_reduce(tensor)
    return float(tensor.item())


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
