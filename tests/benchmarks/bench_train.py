"""Training speed against plain torch, HF Trainer, accelerate and Lightning: `make bench-train`.

    python -m benchmarks.bench_train [--device cuda] [--pairs 200] [--starts 7]      (with tests/ on PYTHONPATH)

On CPU: a step's CPU time in our loop and in theirs, and the CPU time from process start to the first step. With
`--device cuda`: throughput at 124M and 1B parameters in bf16, compiled. docs/benchmarks/train.md says how to read it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import SIZES, gpu_rows
from benchmarks.harness import Arm, Costs, Outcome, interleave
from benchmarks.random_dataset import build_dataset
from benchmarks.rows import Machine, Row, append, compare, exit_code, median_interval, table
from benchmarks.start import start_rows
from benchmarks.train_arms import LLAMA, OUR_DECODER, Setting, accelerate, bare, hf_trainer, lightning, ours
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

WARMUP = 10
LOG_INTERVAL = 10
TARGET = ">= 0.98"
AGAIN = "bare loop again"
"""An arm that is the same as another: what the two differ by is the error of this benchmark."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""One thread, whose time is then all of a step's. And one heap: with glibc's heaps for each thread, page faults depend
on how an arm's heap happens to lie, and equal loops differed by 7 %."""
MODEL = ModelConfig(dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=704)
"""3.7 million parameters with the vocabulary: a step of 384 tokens is 100 to 150 ms of one core."""
VOCAB_SIZE = 2048
SEQ_LEN = 128
BATCH = 3


def main(args: argparse.Namespace) -> int:
    """Run the suite, print it and keep its rows; 1 when a row with a target is not ok."""
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")  # of frameworks: their advice on workers and threads
    machine = Machine.here()
    with tempfile.TemporaryDirectory() as directory:
        if args.device == "cuda":
            rows = [row for size in SIZES for row in gpu_rows(size, machine, Path(directory))]
        else:
            rows = [
                *start_rows(machine, Path(directory) / "start", times=args.starts),
                *cpu_rows(machine, Path(directory) / "steps", pairs=args.pairs),
            ]
    print(table(rows))
    append(rows, "train")
    return exit_code(rows)


def cpu_rows(machine: Machine, directory: Path, *, pairs: int) -> list[Row]:
    """Every arm's steps on one core in fp32."""
    directory.mkdir()
    # The first step is no pair: it follows what a loop does before its first boundary.
    setting = _setting(directory, steps=pairs + WARMUP + 1)
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=600) as world:
        own = [ours(setting, world, "ddp"), ours(setting, world, "fsdp-full")]
        peers = [
            framework(setting, subject)
            for subject in (OUR_DECODER, LLAMA)
            for framework in (hf_trainer, accelerate, lightning)
        ]
        again = Arm(AGAIN, bare(setting).fit)
        outcome = _run([own[0], bare(setting), own[1], *peers, again], setting)
    for arm in own:
        if arm.name in outcome.errors:
            raise outcome.errors[arm.name]
    _print_costs(outcome)
    return _rows(setting, outcome, [arm.name for arm in peers], machine)


def _run(arms: Sequence[Arm], setting: Setting) -> Outcome:
    # What loops print goes to a file, as a job's output does.
    with (setting.directory / "stdout").open("w") as file, redirect_stdout(file):
        return interleave(arms, steps=setting.steps, warmup=WARMUP)


def _rows(setting: Setting, outcome: Outcome, peers: Sequence[str], machine: Machine) -> list[Row]:
    costs, tokens = outcome.costs, setting.tokens_per_step
    rows = _error_of_measurement(costs, tokens, machine)
    for name in ("ours ddp", "ours fsdp-full"):
        for peer in ("bare loop", *peers):
            rows.append(
                compare(
                    f"throughput, {name}",
                    tokens / costs[name].step_seconds,
                    tokens / costs[peer].step_seconds if peer in costs else None,
                    peer_name=peer,
                    unit="tokens/CPU s",
                    # One rank has nothing to shard, so ddp is the strategy to take, and it is the faster one.
                    target=TARGET if (name, peer) == ("ours ddp", "bare loop") else "",
                    machine=machine,
                )
            )
        rows += _against_bare(name, costs, tokens, machine)
    return rows


def _error_of_measurement(costs: Mapping[str, Costs], tokens: int, machine: Machine) -> list[Row]:
    if not {AGAIN, "bare loop"} <= costs.keys():
        return []
    return [
        compare(
            f"throughput, {AGAIN}",
            tokens / costs[AGAIN].step_seconds,
            tokens / costs["bare loop"].step_seconds,
            peer_name="bare loop",
            unit="tokens/CPU s",
            machine=machine,
        )
    ]


def _against_bare(name: str, costs: Mapping[str, Costs], tokens: int, machine: Machine) -> list[Row]:
    own, peer = costs[name], costs.get("bare loop")
    if peer is None:
        return []
    return [
        compare(
            f"throughput with helper threads, {name}",
            tokens / own.process_seconds,
            tokens / peer.process_seconds,
            peer_name="bare loop",
            unit="tokens/process CPU s",
            machine=machine,
        ),
        compare(
            f"framework code per step, {name}",
            (own.step_seconds - peer.step_seconds) * 1e6,
            peer.step_seconds * 1e6,
            peer_name="bare loop",
            unit="us",
            machine=machine,
        ),
    ]


def _print_costs(outcome: Outcome) -> None:
    """Medians of each arm, and what a step of it costs beyond the bare loop's of the same round."""
    base = outcome.costs.get("bare loop")
    print(f"{'arm':36}{'thread ms':>10}{'process ms':>12}{'us beyond the bare loop':>34}")
    for name, cost in outcome.costs.items():
        told = ""
        if base is not None and cost is not base:
            beyond = (cost.step_seconds - base.step_seconds) * 1e6
            low, high = median_interval(beyond)
            told = f"{np.median(beyond):,.0f} [{low:,.0f}, {high:,.0f}]"
        thread, process = (np.median(seconds) * 1e3 for seconds in (cost.step_seconds, cost.process_seconds))
        print(f"{name:36}{thread:10.2f}{process:12.2f}{told:>34}")
    for name, error in outcome.errors.items():
        print(f"{name:36}did not run: {type(error).__name__}: {error}")


def _setting(directory: Path, *, steps: int) -> Setting:
    num_tokens = steps * BATCH * SEQ_LEN + 1
    return Setting(
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        seq_len=SEQ_LEN,
        batch=BATCH,
        steps=steps,
        log_interval=LOG_INTERVAL,
        data_uri=build_dataset(directory / "dataset", vocab_size=VOCAB_SIZE, num_tokens=num_tokens),
        directory=directory,
        device=torch.device("cpu"),
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_train", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=200, help="steps of each arm that are compared (CPU)")
    parser.add_argument("--starts", type=int, default=7, help="process starts of each side (CPU)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = _arguments(sys.argv[1:])
    if arguments.device == "cpu" and not ENVIRONMENT.items() <= os.environ.items():
        # Read when the process starts, so it has to start again.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})
    began = time.perf_counter()
    code = main(arguments)
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(code)
