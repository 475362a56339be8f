"""One rank of a training run: `python -m penstock_trainer.rank --config=<JSON> --data.uri=gs://... [--field=value]`.

Started by our launcher, by torchrun, or alone. It writes how it ended to PENSTOCK_RESULT_FILE and exits with 0 when the
run is done, 134 when another try can continue it (preempted with state saved, or a peer was lost) and 1 otherwise.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from penstock_trainer import preflight
from penstock_trainer.contract.config import JobConfig, parse_args
from penstock_trainer.contract.fields import canonical_json
from penstock_trainer.heartbeat import Heart
from penstock_trainer.observe.flight import FlightRecord, open_store, remember
from penstock_trainer.observe.memory import explain, measure, ran_out_of_memory
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.outcome import RETRYABLE, Outcome
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World, first_line, is_transient

logger = logging.getLogger("penstock_trainer.rank")  # also when run as __main__


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a rank ended; what its launcher reads."""

    outcome: Outcome
    step: int = 0
    """Optimizer steps done, over all attempts."""
    error: str = ""
    """One line."""
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, *, step: int = 0) -> Self:
        """The end that an error is: another try can help when a peer was lost or storage was, and not otherwise."""
        return cls(
            outcome="retryable" if is_transient(error) else "failed",
            step=step,
            error=first_line(error),
            traceback="".join(traceback.format_exception(error)),
        )

    @property
    def exit_code(self) -> int:
        """Of the rank's process."""
        return {"done": 0, "preempted": RETRYABLE, "retryable": RETRYABLE, "failed": 1}[self.outcome]


def run_rank(argv: Sequence[str], env: RankEnv) -> int:
    """Train as one rank and return the exit code, having reported how it ended. Blocks until the run is over."""
    end: End | None = None
    heart = Heart(env.heartbeat_file)
    heart.beat("starting", 0)
    try:
        config = parse_args(argv)
        preemption = Preemption(budget_seconds=config.checkpoint.preemption_seconds)
        remember(config.observe.flight_records, os.environ)
        with preemption.watch(), World.join(env, timeout_seconds=config.engine.timeout_seconds) as world:
            record = _flight_record(config, env)
            with record.watch(config.engine.timeout_seconds):
                end = _train(config, world, preemption, heart, record)
            _report(end, env)  # before the groups are left, which can hang when a peer is lost
            if end.outcome == "retryable":
                record.leave(end.error)
    except Exception as exc:
        logger.exception("rank %d could not %s", env.rank, "leave the others" if end else "start")
        if end is None:
            end = End.of(exc)
            _report(end, env)
    return end.exit_code


def _train(
    config: JobConfig, world: World, preemption: Preemption, heart: Heart, record: FlightRecord
) -> End:
    trainer: Trainer | None = None
    try:
        if config.preflight:
            preflight.check(world)
        trainer = Trainer(config, world, preemption, heart)
        record.attempt = trainer.checkpoints.owner.attempt
        outcome = trainer.fit()
        # Of a preempted run's time, little is left.
        trainer.goodput.close(outcome, timeout_seconds=1.0 if outcome == "preempted" else 10.0)
        return End(outcome=outcome, step=trainer.progress.step)
    except Exception as exc:
        if ran_out_of_memory(exc):
            exc.add_note(_memory_told(config, world, trainer))
        end = End.of(exc, step=trainer.progress.step if trainer else 0)
        logger.exception("rank %d: %s at step %d", world.env.rank, end.outcome, end.step)
        if trainer:
            trainer.goodput.close(end.outcome)
        return end


def _memory_told(config: JobConfig, world: World, trainer: Trainer | None) -> str:
    """What held the memory and what would help. Nothing that goes wrong here hides that it ran out."""
    if trainer is None:
        return explain(None, config)
    try:
        state = trainer.engine.state()
        ranks = world.env.world_size
        return explain(measure(trainer.model, state, config, device=world.device, ranks=ranks), config)
    except Exception as exc:
        return f"What held it cannot be told: {first_line(exc)}"


def _flight_record(config: JobConfig, env: RankEnv) -> FlightRecord:
    return FlightRecord(
        root_uri=config.checkpoint.root_uri(env.checkpoint_dir),
        attempt=env.owner.attempt if env.owner else "unknown",
        rank=env.rank,
        world_size=env.world_size,
        store=open_store(),
    )


def _report(end: End, env: RankEnv) -> None:
    if env.result_file is not None:
        env.result_file.write_text(canonical_json(end))


def main(argv: Sequence[str]) -> int:
    """Read the environment, train, and return the exit code."""
    env = RankEnv.from_environ(os.environ)
    log_to_stderr(logging.INFO if env.is_primary else logging.WARNING, rank=env.rank)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for one and warn on every rank
    # DeepSpeed calls collectives by names that torch has deprecated; nobody who reads a run's log can do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return run_rank(argv, env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
