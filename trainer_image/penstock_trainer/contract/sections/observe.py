"""What a run tells about itself besides its log lines."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_trainer.contract.fields import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveConfig:
    """Trackers, the yardstick of utilisation, and the profiler's window."""

    peak_tflops: float = 0.0
    """Dense peak of one accelerator in the compute type, TFLOP/s: the denominator of MFU. 0: MFU is not reported."""
    tensorboard: bool = True
    """Write event files below AIP_TENSORBOARD_LOG_DIR where that is set, as Vertex does for a job with a TensorBoard."""
    wandb_project: str = ""
    """Weights & Biases project. Empty: none. Without WANDB_API_KEY or WANDB_MODE=offline nothing is sent."""
    profile_start: int = 0
    """First step that torch's profiler records, on every rank; 0: none."""
    profile_steps: int = 3
    """How many it records."""
    flight_records: int = 2000
    """Collectives that each rank remembers, to be written to the checkpoint root when one hangs; 0: none."""

    def __post_init__(self) -> None:
        for name in ("peak_tflops", "profile_start", "flight_records"):
            require(getattr(self, name) >= 0, f"observe.{name}", getattr(self, name), "0 or more")
        require(self.profile_steps > 0, "observe.profile_steps", self.profile_steps, "at least 1 step")
