"""Checkpoints against torch's and Google's own ways, and against what the hardware allows: `make bench-checkpoint`.

    python -m benchmarks.bench_checkpoint [--rounds 8]      (from the repository root, with tests/ on PYTHONPATH)

Each row compares samples that were taken in turns, in one run. docs/benchmarks/checkpoint.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks import checkpoint_restore, plain_http_server, transfer_arms
from benchmarks.checkpoint_hash import seconds_per_gib
from benchmarks.checkpoint_loop import beside_upload
from benchmarks.process_cpu import clean_environment
from benchmarks.restart import restart_rows
from benchmarks.rows import Machine, Row, append, compare, exit_code, table

STALL_TARGET = "<= 1.3"
UPLOAD_TARGET = "<= 0.45"
SOCKET_TARGET = "<= 1.3"
RESTORE_TARGET = "<= 0.5"
LOOP_TARGET = "<= 2.0"
_UPLOAD_BYTES = 512 << 20
_GIB = 2**30


def main(args: argparse.Namespace) -> int:
    """Run the suite, print it and keep its rows; 1 when a row with a target is not ok."""
    machine, rounds = Machine.here(), args.rounds
    suites: Mapping[str, Callable[[Path], list[Row]]] = {
        "stall": lambda _: stall_rows(machine, rounds=rounds),
        "upload": lambda directory: upload_rows(machine, directory, rounds=rounds),
        "loop": lambda _: loop_rows(machine, rounds=rounds),
        "restore": lambda directory: restore_rows(machine, directory, rounds=rounds),
        "restart": lambda directory: restart_rows(machine, directory, times=rounds),
    }
    rows: list[Row] = []
    for name in args.only or suites:
        with tempfile.TemporaryDirectory() as directory:
            rows += suites[name](Path(directory))
    print(table(rows))
    append(rows, "checkpoint")
    return exit_code(rows)


def stall_rows(machine: Machine, *, rounds: int) -> list[Row]:
    """How long a save of 512 MiB keeps the training thread."""
    argv = [sys.executable, "-m", "benchmarks.checkpoint_stall", str(rounds)]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    seconds = {name: np.array(taken) for name, taken in json.loads(done.stdout).items()}

    def row(ours: str, peer: str, target: str = "", clock: str = "CPU") -> Row:
        return compare(
            f"stall of the {ours}, 512 MiB",
            seconds[f"{ours}, {clock}"],
            seconds[f"{peer}, {clock}"],
            peer_name=peer,
            unit="CPU s" if clock == "CPU" else "s",
            target=target,
            machine=machine,
        )

    return [
        row("first save", "copy", STALL_TARGET),
        row("later save", "copy", STALL_TARGET),
        row("first save", "copy", clock="wall"),
        *(row("first save", peer) for peer in ("torch.save", "dcp.save", "dcp.async_save")),
    ]


def upload_rows(machine: Machine, directory: Path, *, rounds: int) -> list[Row]:
    """Client CPU of sending 512 MiB in objects of 64 MiB, CRC32C included; over plain HTTP and over TLS."""
    rows = []
    for tls in (None, directory):
        with plain_http_server.serving(tls) as endpoint:
            arms = {"penstock": [], "blob, from bytes": [], "socket": []}  # type: dict[str, list[float]]
            for number in range(rounds):
                for arm in arms if number % 2 == 0 else reversed(arms):
                    told = transfer_arms.measured("upload", arm, endpoint, _UPLOAD_BYTES, tls=tls)
                    arms[arm].append(told["cpu_seconds"] / told["bytes"] * _GIB)
        over = "TLS" if tls else "HTTP"
        for peer, target in (("blob, from bytes", UPLOAD_TARGET), ("socket", SOCKET_TARGET)):
            rows.append(
                compare(
                    f"upload over {over}",
                    np.array(arms["penstock"]),
                    np.array(arms[peer]),
                    peer_name=peer,
                    unit="CPU s/GiB",
                    target="" if tls else target,
                    machine=machine,
                )
            )
    ours, peer_samples = seconds_per_gib(rounds)
    return [
        *rows,
        compare(
            "SHA-256 and CRC32C of objects and chunks",
            ours,
            peer_samples,
            peer_name="hashlib.sha256",
            unit="CPU s/GiB",
            machine=machine,
        ),
    ]


def loop_rows(machine: Machine, *, rounds: int) -> list[Row]:
    """A Python loop in a rank's place while the writer process beside it hashes and uploads."""
    beside, idle = beside_upload(rounds)
    return [
        compare(
            "p99 of a Python loop beside an upload",
            1000 * beside,
            1000 * idle,
            peer_name="idle",
            unit="ms",
            target=LOOP_TARGET,
            machine=machine,
        )
    ]


def restore_rows(machine: Machine, directory: Path, *, rounds: int) -> list[Row]:
    """CPU of having 512 MiB of state back in its tensors."""
    taken: dict[str, list[float]] = {"ours": [], "blob": []}
    with checkpoint_restore.serving(directory) as endpoint:
        for number in range(rounds):
            for side in taken if number % 2 == 0 else reversed(taken):
                told = checkpoint_restore.measured(side, endpoint)
                taken[side].append(told["cpu_seconds"] / told["bytes"] * _GIB)
    return [
        compare(
            "restore over HTTP",
            np.array(taken["ours"]),
            np.array(taken["blob"]),
            peer_name="Blob.download_as_bytes + torch.load",
            unit="CPU s/GiB",
            target=RESTORE_TARGET,
            machine=machine,
        )
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Checkpoints: stall, upload, restore, restart.")
    parser.add_argument("--rounds", type=int, default=8, help="samples of each side of a row")
    parser.add_argument("--only", action="append", choices=["stall", "upload", "loop", "restore", "restart"])
    sys.exit(main(parser.parse_args()))
