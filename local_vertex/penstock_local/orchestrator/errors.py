"""What can go wrong between a posted pipeline and its tasks.

OrchestratorError
|-- SpecError                 the posted pipeline, with the path of the field
|   |-- InvalidSpecError      it contradicts itself or its parameters do not fit: INVALID_ARGUMENT
|   `-- UnsupportedSpecError  Vertex AI may take it, this engine does not: UNIMPLEMENTED
`-- TaskFailedError           one task cannot start or cannot be accepted; the task fails with this message
    |-- PlaceholderError
    |-- ConditionError
    `-- OutputError
"""


class OrchestratorError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(OrchestratorError):
    """The posted pipeline is refused. `path` names the field, as in `pipelineSpec.root.dag.tasks['train']`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


class InvalidSpecError(SpecError):
    """The spec or the run's parameters are wrong; maps to INVALID_ARGUMENT."""


class UnsupportedSpecError(SpecError):
    """The spec asks for something this engine does not run; maps to UNIMPLEMENTED."""


class TaskFailedError(OrchestratorError):
    """One task fails with this message; the rest of the pipeline follows its failure policy."""


class PlaceholderError(TaskFailedError):
    """A `{{$...}}` placeholder is unknown here or has no value."""


class ConditionError(TaskFailedError):
    """A trigger condition cannot be parsed or its operands have the wrong types."""


class OutputError(TaskFailedError):
    """A finished task did not leave the outputs that its component declares."""
