"""The job config: what one training run is, as a frozen tree of dataclasses with one canonical JSON spelling.

The pipeline's author builds it at compile time; `--config=<canonical JSON>` carries it in the pool's args, and run
time parameters follow as `--<dotted.field>=<value>` (the form in which Vertex hyperparameter tuning appends its own).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_trainer.contract.fields import (
    ContractError,
    canonical_json,
    from_dict,
    load_json,
    parse_leaf,
    require,
)

Strategy = Literal["fsdp-full", "zero2"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the built-in Llama-style decoder. The vocabulary comes from the dataset's tokenizer."""

    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    """Grouped-query attention when smaller than num_heads."""
    ffn_dim: int = 352
    """Inner width of SwiGLU."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """The output head shares the token embedding's weight."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            value = getattr(self, name)
            require(value > 0, f"model.{name}", value, "a positive number")
        require(
            self.dim % self.num_heads == 0,
            "model.dim",
            self.dim,
            f"a multiple of num_heads ({self.num_heads})",
        )
        require(
            (self.dim // self.num_heads) % 2 == 0,
            "model.dim",
            self.dim,
            "an even number of dims per head (RoPE)",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads ({self.num_heads})",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the token shards are and how they are cut into sequences."""

    uri: str = ""
    """Directory that holds the dataset's manifest.json, as gs:// or file:// URI. Given at run time."""
    seq_len: int = 256
    """Tokens per sequence that the model sees at once."""

    def __post_init__(self) -> None:
        require(self.seq_len > 1, "data.seq_len", self.seq_len, "at least 2 tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay, and clipping by the true global gradient norm."""

    learning_rate: float = 3e-3
    """Peak learning rate, reached after warm-up."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    """Decoupled; applied to matrices only (tensors with two or more dims)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "optim.learning_rate", self.learning_rate, "positive")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more steps")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "in [0, 1)")
        require(self.eps > 0, "optim.eps", self.eps, "positive")
        require(self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the model is spread over the ranks."""

    strategy: Strategy = "fsdp-full"
    """`fsdp-full`: torch FSDP2, parameters, gradients and optimizer state sharded. `zero2`: DeepSpeed ZeRO stage 2,
    gradients and optimizer state sharded."""
    precision: Precision = "fp32"
    """Compute type. Master weights and optimizer state are fp32 in both; gradients are reduced in fp32."""
    bucket_bytes: int = 64 * 1024 * 1024
    """Size of a gradient bucket; 64 MiB is what Google's Reduction Server guide recommends for PyTorch."""
    timeout_seconds: int = 600
    """A collective that takes longer fails the attempt."""

    def __post_init__(self) -> None:
        require(self.bucket_bytes > 0, "engine.bucket_bytes", self.bucket_bytes, "positive")
        require(self.timeout_seconds > 0, "engine.timeout_seconds", self.timeout_seconds, "positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When state is saved, and from where a run continues."""

    uri: str = ""
    """Root of the step directories. Empty: AIP_CHECKPOINT_DIR, which Vertex sets from base_output_directory."""
    interval: int = 50
    """Optimizer steps between saves; the last step is always saved."""
    resume_from: str = ""
    """Checkpoint root of an earlier run. Used only while this run has no checkpoint of its own."""

    def __post_init__(self) -> None:
        require(self.interval > 0, "checkpoint.interval", self.interval, "at least 1 step")

    def root_uri(self, checkpoint_dir: str) -> str:
        """`uri`, else `checkpoint_dir` (the value of AIP_CHECKPOINT_DIR). Raises ContractError when both are empty."""
        root_uri = self.uri or checkpoint_dir
        if not root_uri:
            raise ContractError(
                "there is nowhere to write checkpoints: checkpoint.uri is empty and AIP_CHECKPOINT_DIR is not set. "
                "Give --checkpoint.uri=gs://BUCKET/DIR, or set base_output_directory of the job."
            )
        return root_uri


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One training run, complete. `hash` identifies it in checkpoints."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
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

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "max_micro_batch", "log_interval", "processes_per_node"):
            require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")
        require(
            self.optim.warmup_steps < self.steps,
            "optim.warmup_steps",
            self.optim.warmup_steps,
            f"fewer than steps ({self.steps})",
        )

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
