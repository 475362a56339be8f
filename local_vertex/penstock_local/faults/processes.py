"""What is done to processes: SIGKILL, SIGSTOP, or a limit on memory that they have reached already."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from penstock_local.faults.spec import ProcessFault
from penstock_local.jobs.processes import ManagedProcess

_TOLD_CHARACTERS = 60


def strike_processes(replica: ManagedProcess, fault: ProcessFault) -> Iterator[str]:
    """Do it to every process of a replica that matches; what was done to each."""
    for pid in replica.tree():
        command = _command(pid)
        if fault.command.search(command) and fault.environment.items() <= _environment(pid).items():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                yield f"{_strike(pid, fault)} process {pid} ({_short(command)})"


def _strike(pid: int, fault: ProcessFault) -> str:
    if fault.harm == "out-of-memory":
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (used, hard))
        return f"no memory beyond {used:,} bytes for"
    number = signal.SIGKILL if fault.harm == "kill" else signal.SIGSTOP
    os.kill(pid, number)
    return f"{number.name} to"


def _command(pid: int) -> str:
    return _read(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def _environment(pid: int) -> dict[str, str]:
    variables = (
        entry.decode(errors="replace").partition("=") for entry in _read(pid, "environ").split(b"\0")
    )
    return {name: value for name, _, value in variables}


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it has ended


def _short(command: str) -> str:
    return command if len(command) <= _TOLD_CHARACTERS else f"{command[:_TOLD_CHARACTERS]}..."
