"""What can go wrong in a training run that another try will not mend."""

from __future__ import annotations


class TrainerError(Exception):
    """A run that cannot go on; the message says what to change.

    TrainerError
    ├── BatchError        the global batch cannot be cut over the ranks, or the data has no full batch
    ├── EngineError       the strategy does not fit the device, the ranks or the model
    ├── ModelError        the model's source cannot be read, is not covered, or does not fit the data
    ├── UserFunctionError module:function cannot be found, or not be called as the config asks
    ├── DatasetError      a dataset, or an object of it, is not what its manifest says
    ├── CheckpointError   no way to write or to continue
    │   └── FencedError   another attempt owns the checkpoint root by now
    ├── ExportError       an exported model is not what its manifest says
    ├── DivergedError     the loss or the gradient is no longer a number
    ├── TuningError       a trial of a tuning job cannot report
    ├── PreflightError    a rank does not answer, or the nodes do not fit together
    └── PeerError         another rank failed at work that this one waited for
    """


class BatchError(TrainerError):
    """The global batch does not fit the ranks or the data."""


class EngineError(TrainerError):
    """The strategy cannot spread this model over these ranks on this device."""


class ModelError(TrainerError):
    """The source of the model cannot be read, is not covered, or does not fit the data."""


class UserFunctionError(TrainerError):
    """A function that the config names cannot be found, or does not take what it is given."""


class DatasetError(TrainerError):
    """A dataset, or one of its objects, is not what its manifest says."""


class CheckpointError(TrainerError):
    """State can be neither written nor continued from as the config asks."""


class FencedError(CheckpointError):
    """Another attempt has taken the checkpoint root over; this one must stop writing."""


class ExportError(TrainerError):
    """An exported model, or one of its objects, is not what its manifest says."""


class DivergedError(TrainerError):
    """The loss or the gradient's norm is not a finite number."""


class PreflightError(TrainerError):
    """The ranks are not in a state to begin; the message names the nodes."""


class TuningError(TrainerError):
    """A trial of a hyperparameter tuning job cannot tell the service what it reached."""


class PeerError(TrainerError):
    """Another rank failed at work that it did for this one too."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        """`is_transient`: what it failed with may go well another time."""
        super().__init__(message)
        self.is_transient = is_transient
