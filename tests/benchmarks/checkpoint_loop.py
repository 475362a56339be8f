"""A Python loop in the place of a training thread, while another process does what a writer does: hash and upload.

python -m benchmarks.checkpoint_loop ENDPOINT      the other process: uploads until its stdin is closed
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np

from benchmarks import plain_http_server
from benchmarks.process_cpu import clean_environment
from benchmarks.rows import Samples
from benchmarks.transfer_arms import OBJECT_BYTES, host_buffer, upload_arms
from penstock_trainer.checkpoints.layout import PlannedChunk, PlannedObject
from penstock_trainer.checkpoints.writer import NICENESS, hashed

_TURNS = 1500
_SUM_OF = 100_000
"""Numbers that a turn adds up: a few milliseconds of the interpreter."""


def beside_upload(rounds: int) -> tuple[Samples, Samples]:
    """p99 of a turn of the loop in seconds: (beside an upload, idle), in turns."""
    beside, idle = [], []
    with plain_http_server.serving() as endpoint:
        for number in range(rounds):
            for is_idle in (True, False) if number % 2 == 0 else (False, True):
                if is_idle:
                    idle.append(_p99())
                    continue
                writer = _start(endpoint)
                beside.append(_p99())
                _stop(writer)
    return np.array(beside), np.array(idle)


def _p99() -> float:
    took = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        sum(range(_SUM_OF))
        took.append(time.perf_counter() - began)
    return float(np.percentile(took, 99))


def _start(endpoint: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "benchmarks.checkpoint_loop", endpoint]
    writer = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    assert writer.stdout is not None
    writer.stdout.readline()  # it is under way
    return writer


def _stop(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.close()
    writer.wait()
    writer.stdout.close()


def main(endpoint: str) -> None:
    """Upload until stdin ends."""
    os.nice(NICENESS)
    data = host_buffer(4 * OBJECT_BYTES)
    chunk = PlannedChunk(fqn="", offsets=(0,), sizes=(OBJECT_BYTES,), begin=0, length=OBJECT_BYTES)
    planned = PlannedObject(name="", begin=0, end=OBJECT_BYTES, chunks=(chunk,))
    upload = upload_arms(endpoint)["penstock"]()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    upload(data)
    print("under way", flush=True)
    while not ended.is_set():
        hashed(data[:OBJECT_BYTES], planned)
        upload(data[:OBJECT_BYTES])


if __name__ == "__main__":
    main(sys.argv[1])
