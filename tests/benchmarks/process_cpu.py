"""CPU seconds of whole processes, of two commands in turns."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.rows import Samples


def cpu_seconds(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """User and system time of one process and its children. Raises RuntimeError when it fails, with its words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_turns(ours: Sequence[str], peer: Sequence[str], *, times: int) -> tuple[Samples, Samples]:
    """`times` pairs after one that fills the file cache and writes byte code; the order alternates (ABBA)."""
    taken: dict[int, list[float]] = {0: [], 1: []}
    for number in range(times + 1):
        sides = [(0, ours), (1, peer)]
        for side, argv in sides if number % 2 == 0 else reversed(sides):
            taken[side].append(cpu_seconds(argv, clean_environment()))
    return np.array(taken[0][1:]), np.array(taken[1][1:])


def clean_environment() -> dict[str, str]:
    """This process's, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
