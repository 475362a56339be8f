"""When state is saved, and from where a run continues."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_trainer.contract.fields import ContractError, require


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
