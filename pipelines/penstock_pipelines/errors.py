"""What goes wrong for the user of the command, with the exit code that says whose fault it is."""

from __future__ import annotations


class PenstockError(Exception):
    """Shown as one message, without a traceback.

    PenstockError       1  findings, or a run that failed
    ├── InputError      2  what the user gave
    └── ServiceError    3  the service, or the stand-in, did not answer as it should
    """

    exit_code = 1


class InputError(PenstockError):
    """What the user gave is wrong; the message says what is allowed."""

    exit_code = 2


class ServiceError(PenstockError):
    """The service, or the stand-in, did not answer as it should."""

    exit_code = 3
