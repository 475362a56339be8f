"""Every arm's steps on one core in fp32, in processes of their own.

    python -m benchmarks.cpu_steps <file> <pairs> <seed> <with frameworks: 0 or 1>

How an arm's memory happens to lie in a process moves its steps by two per cent and more: equal loops differ by as much
from one process to the next. So the pairs are taken from several processes. And with transformers, accelerate and
Lightning in the process our loop is two per cent slower against the bare one than without, which is how it runs; so the
two are compared in processes of their own, and in those of the frameworks for information.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Arm, Costs, Outcome, interleave
from benchmarks.random_dataset import build_dataset
from benchmarks.train_arms import LLAMA, OUR_DECODER, Setting, accelerate, bare, hf_trainer, lightning, ours
from penstock_trainer.contract.config import JobConfig, ModelConfig
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

OURS, BARE = "ours", "bare loop"
AGAIN = "bare loop again"
"""An arm that is the same as another: what the two differ by is the error of this benchmark."""
FRAMEWORKS = (hf_trainer, accelerate, lightning)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""One thread, whose time is then all of a step's. And one heap, as a loop in a main thread has it: with glibc's heaps for
each thread, equal loops differed by 7 %."""
MODEL = ModelConfig(dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=704)
"""3.7 million parameters with the vocabulary: a step of 384 tokens is 100 to 150 ms of one core."""
VOCAB_SIZE = 2048
SEQ_LEN = 128
BATCH = 3
LOG_INTERVAL = 10
TOKENS_PER_STEP = BATCH * SEQ_LEN
_WARMUP = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Of all processes together."""

    costs: dict[str, Costs]
    """By arm; round i of all arms is of the same moment."""
    errors: dict[str, str]
    """Of the arms that did not run."""


def measure(*, pairs: int, processes: int, with_frameworks: bool) -> Measured:
    """At least `pairs` steps of each arm: ours, the bare loop twice, and on demand the frameworks'. Blocks for minutes. Raises CalledProcessError when our own arm fails."""
    told = [
        _of_a_process(-(-pairs // processes), seed, with_frameworks=with_frameworks)
        for seed in range(processes)
    ]
    errors = {name: error for one in told for name, error in one["errors"].items()}
    names = [name for name in told[0]["costs"] if name not in errors]
    return Measured(
        costs={
            name: Costs(
                step_seconds=np.concatenate([one["costs"][name][0] for one in told]),
                process_seconds=np.concatenate([one["costs"][name][1] for one in told]),
            )
            for name in names
        },
        errors=errors,
    )


def _of_a_process(pairs: int, seed: int, *, with_frameworks: bool) -> dict[str, dict[str, list[list[float]]]]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "costs.json"
        arguments = [str(file), str(pairs), str(seed), str(int(with_frameworks))]
        command = [sys.executable, "-m", "benchmarks.cpu_steps", *arguments]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
        told: dict[str, dict[str, list[list[float]]]] = json.loads(file.read_text())
    return told


def run(directory: Path, *, pairs: int, seed: int, with_frameworks: bool) -> Outcome:
    """The arms in turns in this process. Raises what our own arm raises."""
    # The first step is no pair: it follows what a loop does before its first boundary.
    steps = pairs + _WARMUP + 1
    setting = Setting(
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        seq_len=SEQ_LEN,
        batch=BATCH,
        steps=steps,
        log_interval=LOG_INTERVAL,
        data_uri=build_dataset(
            directory / "dataset", vocab_size=VOCAB_SIZE, num_tokens=steps * TOKENS_PER_STEP + 1
        ),
        directory=directory,
        device=torch.device("cpu"),
    )
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=600) as world:
        own = Arm(OURS, ours(setting, world, JobConfig().engine.strategy).fit)
        arms = [own, bare(setting), Arm(AGAIN, bare(setting).fit)]
        if with_frameworks:
            arms += [
                framework(setting, subject) for subject in (OUR_DECODER, LLAMA) for framework in FRAMEWORKS
            ]
        # What loops print goes to a file, as a job's output does.
        with (directory / "stdout").open("w") as file, redirect_stdout(file):
            outcome = interleave(arms, steps=steps, warmup=_WARMUP, seed=seed)
    if OURS in outcome.errors:
        raise outcome.errors[OURS]
    return outcome


def main(path: Path, pairs: int, seed: int, *, with_frameworks: bool) -> None:
    """Leave the costs and errors of this process in a file."""
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")  # of frameworks: their advice on workers and threads
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(Path(directory), pairs=pairs, seed=seed, with_frameworks=with_frameworks)
    told = {
        "costs": {
            name: [cost.step_seconds.tolist(), cost.process_seconds.tolist()]
            for name, cost in outcome.costs.items()
        },
        "errors": {name: f"{type(error).__name__}: {error}" for name, error in outcome.errors.items()},
    }
    path.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), with_frameworks=sys.argv[4] == "1")
