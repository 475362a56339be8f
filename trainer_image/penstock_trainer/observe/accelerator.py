"""Memory and utilisation of the device that a rank computes on."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """On CUDA the most that torch's allocator has had in use; on CPU the most that the process has had resident.

    Since the start of the process. Raises OSError on a system without /proc.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # VmHWM is the process's own: getrusage's maximum is inherited from the process that started it.
    told = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(told[1]) * 1024 if told else 0


class Utilization:
    """Share of its last sample period (1/6 s to 1 s) in which an NVIDIA GPU ran a kernel, as NVML tells it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def read(self) -> float | None:
        """From 0 to 1. None on CPU, and where NVML cannot be asked; it is not asked again then."""
        if self._device is None:
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except (
            Exception
        ):  # no pynvml, no permission, or a device that does not tell: torch has no type for them
            self._device = None
            return None
