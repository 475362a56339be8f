"""When state is saved, and from where a run continues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from penstock_trainer.contract.fields import ContractError, require

WhenBusy = Literal["wait", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When state is saved, what is kept, and from where a run continues."""

    uri: str = ""
    """Root of the step directories. Empty: AIP_CHECKPOINT_DIR, which Vertex sets from base_output_directory."""
    interval: int = 50
    """Optimizer steps between saves; the last step is always saved."""
    resume_from: str = ""
    """Checkpoint root of an earlier run. Used only while this run has no checkpoint of its own."""
    when_busy: WhenBusy = "wait"
    """What a save does that comes while the one before is still being written: wait, or leave itself out. Which it was is
    logged. The last save waits, and so does that of a best step."""
    keep_last: int = 3
    """Newest checkpoints that are kept; 0: all. At least 2, so that there is one to fall back to."""
    keep_every: int = 0
    """Steps whose multiples are kept besides; 0: none."""
    keep_best: bool = True
    """Keep the best step of a run that evaluates, whatever its age."""
    preemption_seconds: float = 25.0
    """From SIGTERM to the end of the process, the last save included. A Spot VM is gone 30 s after its notice."""
    local_dir: str = ""
    """Absolute path on each node's own disk to which every save goes first; a restart on the same nodes continues from
    there. Empty: straight to `uri`."""
    upload_every: int = 1
    """With local_dir: of the saves, every so many-th goes to `uri` too, and the last always."""

    def __post_init__(self) -> None:
        require(self.interval > 0, "checkpoint.interval", self.interval, "at least 1 step")
        require(
            self.keep_last == 0 or self.keep_last >= 2,
            "checkpoint.keep_last",
            self.keep_last,
            "0 (keep all) or at least 2, as the newest may turn out to be damaged",
        )
        require(
            self.keep_every >= 0, "checkpoint.keep_every", self.keep_every, "0 (none) or a number of steps"
        )
        require(
            self.preemption_seconds > 0, "checkpoint.preemption_seconds", self.preemption_seconds, "above 0"
        )
        require(
            not self.local_dir or PurePosixPath(self.local_dir).is_absolute(),
            "checkpoint.local_dir",
            self.local_dir,
            "an absolute path on the nodes, or empty",
        )
        require(self.upload_every > 0, "checkpoint.upload_every", self.upload_every, "at least 1")
        require(
            self.upload_every == 1 or bool(self.local_dir),
            "checkpoint.upload_every",
            self.upload_every,
            "1, unless checkpoint.local_dir keeps the saves between",
        )

    def root_uri(self, checkpoint_dir: str) -> str:
        """`uri`, else `checkpoint_dir` (the value of AIP_CHECKPOINT_DIR). Raises ContractError when both are empty."""
        root_uri = self.uri or checkpoint_dir
        if not root_uri:
            raise ContractError(
                "there is nowhere to write checkpoints: checkpoint.uri is empty and AIP_CHECKPOINT_DIR is not set. "
                "Give --checkpoint.uri=gs://BUCKET/DIR, or set base_output_directory of the job."
            )
        return root_uri
