"""A rank's side of its writer process: started, spoken to, and started again when it was lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock_trainer import die_with_parent
from penstock_trainer.checkpoints.writer import Failure, Setup
from penstock_trainer.contract.fields import canonical_json, from_dict
from penstock_trainer.errors import CheckpointError, FencedError, PeerError
from penstock_trainer.storage import StorageError, StorageUnavailableError

_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "fenced": FencedError,
    "unavailable": StorageUnavailableError,
    "lost": partial(PeerError, is_transient=True),
    "refused": StorageError,
    "impossible": CheckpointError,
}


def error_of(failure: Failure) -> Exception:
    """The error that a failure was made of."""
    return _ERRORS[failure.kind](failure.error)


class WriterLostError(Exception):
    """The process ended before it had answered."""


class WriterProcess:
    """One process. For one thread, with whose end the kernel ends it too (see die_with_parent)."""

    def __init__(self, setup: Setup, buffer_fileno: int) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid())),
                *(sys.executable, "-m", "penstock_trainer.checkpoints.writer", str(buffer_fileno)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[buffer_fileno],
            text=True,
        )
        self._setup = setup
        self._is_set_up = False

    def ask(self, command: str, told: Mapping[str, Any]) -> Any:
        """The answer to a command. Blocks until it is there.

        Raises WriterLostError; and what the writer failed with: FencedError, StorageError or StorageUnavailableError.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if not self._is_set_up:
                self._send({"setup": self._setup})
                self._is_set_up = True
            self._send({command: told})
            line = self._process.stdout.readline()
        except BrokenPipeError as exc:
            raise WriterLostError(f"exit code {self._process.wait()}") from exc
        if not line.endswith("\n"):
            raise WriterLostError(f"exit code {self._process.wait()}")
        [(kind, answer)] = json.loads(line).items()
        if kind == "failed":
            raise error_of(from_dict(Failure, answer))
        return answer

    def close(self) -> None:
        """Let it finish what it does, and end. Blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def kill(self) -> None:
        """End it now, whatever it does. For any thread; nothing happens when it has ended."""
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(canonical_json(message) + "\n")
        self._process.stdin.flush()
