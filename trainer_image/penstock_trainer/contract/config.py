"""The job config: what one training run is, as a frozen tree of dataclasses with one canonical JSON spelling.

The pipeline's author builds it at compile time; `--config=<canonical JSON>` carries it in the pool's args, and run
time parameters follow as `--<dotted.field>=<value>` (the form in which Vertex hyperparameter tuning appends its own).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_trainer.contract.deepspeed import check_deepspeed
from penstock_trainer.contract.fields import (
    ContractError,
    canonical_json,
    from_dict,
    load_json,
    parse_leaf,
    require,
)
from penstock_trainer.contract.sections.checkpoint import CheckpointConfig
from penstock_trainer.contract.sections.data import DataConfig
from penstock_trainer.contract.sections.engine import EngineConfig, Precision, Strategy
from penstock_trainer.contract.sections.evaluation import EvaluationConfig
from penstock_trainer.contract.sections.guard import GuardConfig
from penstock_trainer.contract.sections.model import ModelConfig, RopeScaling
from penstock_trainer.contract.sections.observe import ObserveConfig
from penstock_trainer.contract.sections.optim import OptimConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GuardConfig",
    "JobConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimConfig",
    "Precision",
    "RopeScaling",
    "Strategy",
    "compile_time_json",
    "parse_args",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One training run, complete. `hash` identifies it in checkpoints."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    steps: int = 200
    """Optimizer steps of the whole run, over all attempts."""
    global_batch: int = 16
    """Sequences per optimizer step over all ranks: fixed, whatever the world size."""
    max_micro_batch: int = 8
    """Most sequences that one rank takes through the model at once; accumulation makes up the rest."""
    seed: int = 0
    log_interval: int = 10
    """Optimizer steps between two structured log lines."""
    processes_per_node: int = 1
    """Ranks on a node without accelerators; with accelerators there is one rank for each."""
    max_restarts: int = 3
    """Times that all ranks of the job are started again in place after one was lost, before the job is given back to
    the platform."""
    preflight: bool = True
    """Check nodes and network before the run begins, and name the bad one."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "max_micro_batch", "log_interval", "processes_per_node"):
            require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")
        require(
            self.optim.warmup_steps < self.steps,
            "optim.warmup_steps",
            self.optim.warmup_steps,
            f"fewer than steps ({self.steps})",
        )
        require(
            self.optim.warmup_steps + self.optim.decay_steps <= self.steps,
            "optim.decay_steps",
            self.optim.decay_steps,
            f"at most what warm-up leaves of steps ({self.steps - self.optim.warmup_steps})",
        )
        require(
            self.checkpoint.keep_best or not self.checkpoint.keep_last or not self.evaluation.export_best,
            "checkpoint.keep_best",
            self.checkpoint.keep_best,
            "true where evaluation.export_best is, or keep_last must be 0: the best step's checkpoint is what is exported",
        )
        require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "0 or more")
        check_deepspeed(self.engine.deepspeed, self)

    def micro_batch(self, world_size: int) -> int:
        """Sequences that a rank takes through the model at once: the largest divisor of its part of the global batch up to
        max_micro_batch. For a world size that divides global_batch."""
        per_rank = self.global_batch // world_size
        return max(size for size in range(1, self.max_micro_batch + 1) if per_rank % size == 0)

    def to_json(self) -> str:
        """The canonical spelling: equal configs give equal bytes."""
        return canonical_json(self)

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical spelling, without where this run reads and writes."""
        told = json.loads(self.to_json())
        told["data"].pop("uri")
        told["checkpoint"] = {"interval": self.checkpoint.interval}
        return hashlib.sha256(canonical_json(told).encode()).hexdigest()[:16]


def parse_args(argv: Sequence[str]) -> JobConfig:
    """The config that a pool's args stand for: one `--config=<JSON>`, then `--<dotted.field>=<value>` for the rest.

    Raises ContractError: an argument of another form, an unknown field (the nearest is named), a value that does
    not fit, or a field given twice, by two flags or by `--config` and a flag.
    """
    given: dict[str, str] = {}
    for argument in argv:
        name, separator, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not separator:
            raise ContractError(f"argument {argument!r} is not of the form --<field>=<value>.")
        if name in given:
            raise ContractError(f"--{name} is given twice ({given[name]!r} and {value!r}); give it once.")
        given[name] = value
    told = load_json(given.pop("config", "{}"), "--config (the output of JobConfig.to_json())")
    require(isinstance(told, dict), "--config", told, "a JSON object")
    for dotted, value in given.items():
        _set(told, dotted, parse_leaf(JobConfig, dotted, value))
    return from_dict(JobConfig, told)


def _set(told: dict[str, Any], dotted: str, value: object) -> None:
    """Put one flag's value into what `--config` gave. Raises ContractError if it is there already."""
    *parents, leaf = dotted.split(".")
    node = told
    for name in parents:
        node = node.setdefault(name, {})
    if leaf in node:
        raise ContractError(
            f"{dotted} is set by --config ({node[leaf]!r}) and by a flag ({value!r}); one place only."
        )
    node[leaf] = value


def compile_time_json(config: JobConfig, *, runtime: Sequence[str]) -> str:
    """Canonical JSON of `config` without the dotted fields that run time parameters will give.

    Raises ContractError for a run time field that does not exist.
    """
    data = json.loads(config.to_json())
    for dotted in runtime:
        *parents, leaf = dotted.split(".")
        node = data
        for name in parents:
            node = node.get(name, {})
        if leaf not in node:
            raise ContractError(f"run time field {dotted!r} is not a field of the job config.")
        del node[leaf]
    return canonical_json(data)
