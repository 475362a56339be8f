"""Memory that a rank and its writer process share: the copy of the state that is written while training goes on."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from torch import Tensor


class HostBuffer:
    """`nbytes` of host memory, there from the start: every page is touched here, so that the first save is as fast as any.

    A memfd and not /dev/shm, of which a container gets 64 MiB by default. With CUDA it is page-locked, so that copies from
    the device are direct. Counts as memory of this process' container. Raises OSError when there is not so much.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fileno = os.memfd_create("penstock-checkpoint", 0)
        size = max(nbytes, 1)
        os.posix_fallocate(self.fileno, 0, size)  # an error here, and not SIGBUS at a copy
        self._map = mmap.mmap(self.fileno, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=size)
        """[nbytes], uint8."""
        if torch.cuda.is_available():
            _check(_cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0))

    def close(self) -> None:
        """Give the memory back. The writer keeps its view until it ends."""
        if torch.cuda.is_available():
            # Its result is not looked at: after an error of the device it is that error, which is told already.
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor
        self._map.close()
        os.close(self.fileno)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: Any) -> None:
    torch.cuda.check_error(int(code))
