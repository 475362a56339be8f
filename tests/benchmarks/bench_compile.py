"""Compile and start-up time against kfp's own compiler: `make bench-compile`.

    python -m benchmarks.bench_compile [--times 15]      (from the repository root, with tests/ on PYTHONPATH)

CPU seconds of whole processes: `penstock compile` and `kfp dsl compile` of the same pipeline, in turns; then the verbs that
people wait for, beside a Python that does nothing. docs/benchmarks/compile.md says how to read it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process_cpu import in_turns
from benchmarks.rows import Machine, Row, append, compare, exit_code, table

COMPILE_TARGET = "<= 0.55"
MOST_CPU_SECONDS = 0.3
"""Of a verb that people wait for."""
_HERE = Path(__file__).parent
_BIN = Path(sys.executable).parent
_PENSTOCK = [str(_BIN / "penstock")]
_JOB = _HERE.parent / "golden" / "jobs" / "a100-reduction-server.yaml"


def main(args: argparse.Namespace) -> int:
    """Run the suite, print it and keep its rows; 1 when a row with a target is not ok."""
    machine = Machine.here()
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            compile_row(machine, Path(directory), times=args.times),
            *verb_rows(machine, times=args.times),
        ]
    print(table(rows))
    slow = [row for row in rows if row.unit == "CPU s" and not row.target and row.ours >= MOST_CPU_SECONDS]
    for row in slow:
        print(f"{row.metric}: {row.ours:.2f} CPU s is not under {MOST_CPU_SECONDS} s")
    append(rows, "compile")
    return exit_code(rows) or int(bool(slow))


def compile_row(machine: Machine, directory: Path, *, times: int) -> Row:
    """The same pipeline, both ways, to the same bytes."""
    ours = [*_PENSTOCK, "compile", "tiny-zero2", "--output", str(directory / "ours.yaml")]
    kfp = [str(_BIN / "kfp"), "dsl", "compile", "--py", str(_HERE / "kfp_source.py"), "--output"]
    peer = [*kfp, str(directory / "kfp.yaml")]
    samples = in_turns(ours, peer, times=times)
    if (directory / "ours.yaml").read_bytes() != (directory / "kfp.yaml").read_bytes():
        raise RuntimeError("the two compilers wrote different bytes")
    return compare(
        "compile",
        *samples,
        peer_name="kfp dsl compile",
        unit="CPU seconds",
        machine=machine,
        target=COMPILE_TARGET,
    )


def verb_rows(machine: Machine, *, times: int) -> list[Row]:
    """Whole processes of our verbs, beside an interpreter that does nothing."""
    verbs: dict[str, Sequence[str]] = {
        "penstock --help": ["--help"],
        "penstock plan": ["plan", "tiny-zero2"],
        "penstock check of a job file": ["check", str(_JOB)],
    }
    nothing = [sys.executable, "-c", "pass"]
    return [
        compare(
            name,
            *in_turns([*_PENSTOCK, *verb], nothing, times=times),
            peer_name="python -c pass",
            unit="CPU s",
            machine=machine,
        )
        for name, verb in verbs.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile and start-up time.")
    parser.add_argument("--times", type=int, default=15, help="pairs of processes for each row")
    sys.exit(main(parser.parse_args()))
