"""Training speed against plain torch, HF Trainer, accelerate and Lightning: `make bench-train`.

    python -m benchmarks.bench_train [--device cuda] [--pairs 200] [--starts 7]      (with tests/ on PYTHONPATH)

On CPU: a step's CPU time in our loop and in theirs, and the CPU time from process start to the first step. With
`--device cuda`: throughput at 124M and 1B parameters in bf16, compiled. docs/benchmarks/train.md says how to read it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.cpu_steps import AGAIN, BARE, OURS, TOKENS_PER_STEP, Measured, measure
from benchmarks.gpu import SIZES, gpu_rows
from benchmarks.rows import Machine, Row, append, compare, exit_code, median_interval, table
from benchmarks.start import start_rows

TARGET = ">= 0.98"


def main(args: argparse.Namespace) -> int:
    """Run the suite, print it and keep its rows; 1 when a row with a target is not ok."""
    machine = Machine.here()
    with tempfile.TemporaryDirectory() as directory:
        if args.device == "cuda":
            rows = [row for size in SIZES for row in gpu_rows(size, machine, Path(directory))]
        else:
            rows = [
                *start_rows(machine, Path(directory) / "start", times=args.starts),
                *cpu_rows(machine, pairs=args.pairs, processes=args.processes),
            ]
    print(table(rows))
    append(rows, "train")
    return exit_code(rows)


def cpu_rows(machine: Machine, *, pairs: int, processes: int) -> list[Row]:
    """Throughput against each peer, and what a step of ours has beyond the bare loop's."""
    alone = measure(pairs=pairs, processes=processes, with_frameworks=False)
    _print_costs(alone, "ours and plain torch alone")
    among = measure(pairs=pairs, processes=processes, with_frameworks=True)
    _print_costs(among, "in a process with the frameworks")
    own, bare = alone.costs[OURS], alone.costs[BARE]
    return [
        _throughput(alone, OURS, BARE, machine, target=TARGET),
        _throughput(alone, AGAIN, BARE, machine, metric=f"throughput, {AGAIN}"),
        *(
            _throughput(among, OURS, name, machine, metric="throughput among frameworks")
            for name in [*among.costs, *among.errors]
            if name not in (OURS, AGAIN)
        ),
        compare(
            "throughput with helper threads",
            TOKENS_PER_STEP / own.process_seconds,
            TOKENS_PER_STEP / bare.process_seconds,
            peer_name=BARE,
            unit="tokens/process CPU s",
            machine=machine,
        ),
        compare(
            "framework code per step",
            (own.step_seconds - bare.step_seconds) * 1e6,
            bare.step_seconds * 1e6,
            peer_name=BARE,
            unit="us",
            machine=machine,
        ),
    ]


def _throughput(
    measured: Measured,
    name: str,
    peer: str,
    machine: Machine,
    *,
    metric: str = "throughput",
    target: str = "",
) -> Row:
    costs = measured.costs
    return compare(
        metric,
        TOKENS_PER_STEP / costs[name].step_seconds,
        TOKENS_PER_STEP / costs[peer].step_seconds if peer in costs else None,
        peer_name=peer,
        unit="tokens/CPU s",
        target=target,
        machine=machine,
    )


def _print_costs(measured: Measured, title: str) -> None:
    """Medians of each arm, and what a step of it costs beyond the bare loop's of the same round."""
    base = measured.costs[BARE]
    print(f"{title:36}{'thread ms':>10}{'process ms':>12}{'us beyond the bare loop':>34}")
    for name, cost in measured.costs.items():
        told = ""
        if cost is not base:
            beyond = (cost.step_seconds - base.step_seconds) * 1e6
            low, high = median_interval(beyond)
            told = f"{np.median(beyond):,.0f} [{low:,.0f}, {high:,.0f}]"
        thread, process = (np.median(seconds) * 1e3 for seconds in (cost.step_seconds, cost.process_seconds))
        print(f"{name:36}{thread:10.2f}{process:12.2f}{told:>34}")
    for name, error in measured.errors.items():
        print(f"{name:36}did not run: {error}")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_train", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=200, help="steps of each arm that are compared (CPU)")
    parser.add_argument("--processes", type=int, default=5, help="in which they are taken (CPU)")
    parser.add_argument("--starts", type=int, default=7, help="process starts of each side (CPU)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    began = time.perf_counter()
    code = main(_arguments(sys.argv[1:]))
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(code)
