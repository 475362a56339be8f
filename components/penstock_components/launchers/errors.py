"""The one tree of errors of the launchers: what a person can mend, in words for the reader of the task's log."""


class LauncherError(Exception):
    """A task that cannot go on. A launcher prints the message without a traceback and exits 1.

    LauncherError
    ├── InputError          a parameter or artifact that is missing, ill-typed or out of range
    ├── SourceError         the source is missing, empty or not what was fingerprinted
    │   └── DocumentError   an object or a line that is not a document
    ├── DatasetError        the documents do not make a dataset, or the tokenizer cannot serve one
    ├── ContractFileError   an object that another task wrote is missing or does not keep its contract
    ├── CheckpointError     no complete checkpoint or export to take over, or a copy that is not its original
    ├── ScoringError        the scorer failed, or wrote something else than scores
    └── RegistryError       the Model Registry refused a request
    """


class InputError(LauncherError):
    """A parameter or artifact of the task that is missing, ill-typed or out of range."""


class SourceError(LauncherError):
    """The source objects are missing, empty or not those that were fingerprinted."""


class DocumentError(SourceError):
    """An object or a line of the source that is not a document; the message carries the place."""


class DatasetError(LauncherError):
    """The documents do not make a dataset that a run can use, or the tokenizer cannot serve one."""


class ContractFileError(LauncherError):
    """An object that another task should have written is missing or does not keep its contract."""


class CheckpointError(LauncherError):
    """There is no complete checkpoint or export to take over, or a copy is not its original."""


class ScoringError(LauncherError):
    """The scorer's process failed, or wrote something else than scores."""


class RegistryError(LauncherError):
    """The Model Registry refused a request."""
