"""What one rank reads from its environment; the trainer reads it nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from penstock_trainer.contract.checkpoint import Owner


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnv:
    """This process's place among the ranks, and where its run reads and writes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Also the index of the rank's accelerator."""
    local_world_size: int = 1
    """Ranks of this node."""
    master_addr: str | None = None
    """None: no other rank exists, and no store is needed to find one."""
    master_port: int | None = None
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS. None: the ranks of a node share its processors."""
    owner: Owner | None = None
    """The attempt that our launcher minted. None under any other launcher: then rank 0 takes ownership itself."""
    result_file: Path | None = None
    """Where the launcher reads how the rank ended."""
    heartbeat_file: Path | None = None
    """Where the launcher looks for signs of life of the rank. None: nobody does."""
    checkpoint_dir: str = ""
    """AIP_CHECKPOINT_DIR, which Vertex sets from base_output_directory."""
    model_dir: str = ""
    """AIP_MODEL_DIR; where the trained model is exported to."""
    tensorboard_dir: str = ""
    """AIP_TENSORBOARD_LOG_DIR, which Vertex sets for a job with a TensorBoard."""
    wandb_mode: Literal["online", "offline"] | None = None
    """WANDB_MODE=offline, or online where WANDB_API_KEY is set; None: nothing is tracked there."""
    trial_id: str = ""
    """Of a hyperparameter tuning job: CLOUD_ML_TRIAL_ID, else the trial that CLUSTER_SPEC names. Empty outside of one."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """The environment of torchrun or of our launcher; without WORLD_SIZE, a single process."""
        attempt = environ.get("PENSTOCK_ATTEMPT")
        result_file = environ.get("PENSTOCK_RESULT_FILE")
        heartbeat_file = environ.get("PENSTOCK_HEARTBEAT_FILE")
        threads = environ.get("OMP_NUM_THREADS")
        grouped = "WORLD_SIZE" in environ
        return cls(
            rank=int(environ.get("RANK", "0")) if grouped else 0,
            world_size=int(environ.get("WORLD_SIZE", "1")),
            local_rank=int(environ.get("LOCAL_RANK", "0")) if grouped else 0,
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")) if grouped else 1,
            master_addr=environ.get("MASTER_ADDR") if grouped else None,
            master_port=int(environ["MASTER_PORT"]) if grouped and "MASTER_PORT" in environ else None,
            omp_num_threads=int(threads) if threads else None,
            owner=Owner(attempt=attempt, fencing_token=int(environ["PENSTOCK_FENCING_TOKEN"]))
            if attempt
            else None,
            result_file=Path(result_file) if result_file else None,
            heartbeat_file=Path(heartbeat_file) if heartbeat_file else None,
            checkpoint_dir=environ.get("AIP_CHECKPOINT_DIR", ""),
            model_dir=environ.get("AIP_MODEL_DIR", ""),
            tensorboard_dir=environ.get("AIP_TENSORBOARD_LOG_DIR", ""),
            wandb_mode=_wandb_mode(environ),
            trial_id=environ.get("CLOUD_ML_TRIAL_ID", "") or _trial_of(environ.get("CLUSTER_SPEC", "")),
        )

    @property
    def is_primary(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


def _wandb_mode(environ: Mapping[str, str]) -> Literal["online", "offline"] | None:
    mode = environ.get("WANDB_MODE", "online")
    if mode == "offline":
        return "offline"
    return "online" if mode == "online" and environ.get("WANDB_API_KEY") else None


def _trial_of(cluster_spec: str) -> str:
    """The trial that CLUSTER_SPEC names: absent, empty, or an id. What is wrong with it, the launcher says."""
    try:
        trial = json.loads(cluster_spec)["task"]["trial"]
    except (ValueError, KeyError, TypeError):
        return ""
    return trial if isinstance(trial, str) else ""
