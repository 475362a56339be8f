"""Python's garbage collector, at the same step on every rank.

Left to itself it runs on each rank when that one has made enough objects, and a step in which any rank collects is long
for all of them. What was made before the first step (modules, imports) is not looked at again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 50
"""Steps. As torchtitan has it; what is left between two is freed by reference counts but for cycles, and those are small."""


@contextmanager
def collected_by_step() -> Iterator[None]:
    """Within it nothing is collected but by `collect_at`."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_at(step: int) -> None:
    """After a step: collect what is young when its turn has come."""
    if step % INTERVAL == 0:
        gc.collect(1)
