"""Which of this machine's GPUs each replica sees. Replicas of one job share none: NCCL refuses two ranks on one device.

Jobs that run at the same time are not kept apart from each other.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from itertools import accumulate, pairwise


def divide(devices: Sequence[str], wanted: Sequence[int]) -> list[tuple[str, ...]] | None:
    """`wanted[i]` devices for replica i, in order; None when there are not enough for all."""
    if sum(wanted) > len(devices):
        return None
    return [tuple(devices[begin:end]) for begin, end in pairwise(accumulate(wanted, initial=0))]


def visible_devices() -> tuple[str, ...]:
    """The NVIDIA GPUs that the stand-in may use, as CUDA_VISIBLE_DEVICES names them; none without a driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)  # noqa: S607  # where it lies differs
    except (OSError, subprocess.SubprocessError):
        return ()
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return tuple(str(number) for number in range(count))
