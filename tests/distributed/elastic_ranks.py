"""Somebody's script under torchrun: `python -m distributed.elastic_ranks FUNCTION [MARKER]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def reduce_ranks() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    say(f"world {int(tensor.item())}")


def kill_rank_1_once() -> None:
    """MARKER tells that it has happened: the agents' counts of restarts need not be equal."""
    marker = Path(sys.argv[2])
    reduce_ranks()
    if RANK == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_ranks()
    dist.destroy_process_group()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits_3() -> None:
    sys.exit(3)


def exits_134() -> None:
    sys.exit(134)


def waits() -> None:
    say(f"waiting {os.getpid()}")
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
