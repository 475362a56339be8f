"""The state directory of a stand-in: who uses it, and where its parts lie."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


class StateInUseError(Exception):
    """Another stand-in is running on the state directory."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a running stand-in tells its clients through `server.json`."""

    pid: int
    front_port: int
    project_id: str
    location: str
    environment: Mapping[str, str]
    """Variables that a client sets."""
    unset: tuple[str, ...]
    """Variables that a client removes."""


@dataclass(frozen=True, slots=True)
class StateDirectory:
    """Paths below one directory. Nothing outside it is written."""

    root: Path

    @property
    def database(self) -> Path:
        """Resources of the API."""
        return self.root / "resources.sqlite"

    @property
    def log_database(self) -> Path:
        """Lines of tasks and replicas."""
        return self.root / "logs.sqlite"

    @property
    def objects(self) -> Path:
        """Cloud Storage."""
        return self.root / "objects"

    @property
    def work(self) -> Path:
        """Working directories of tasks and replicas."""
        return self.root / "work"

    @property
    def temporary(self) -> Path:
        """TMPDIR of tasks and replicas; a short path, because sockets have a place in it."""
        return self.root / "tmp"

    @property
    def identity(self) -> Path:
        """Certificates and credentials of the present start."""
        return self.root / "identity"

    @property
    def processes(self) -> Path:
        """Records of running process groups."""
        return self.root / "processes"

    @property
    def server_file(self) -> Path:
        """ServerInfo of the running stand-in; absent when none runs."""
        return self.root / "server.json"

    def lock(self) -> IO[str]:
        """Take the directory for this process, until the returned file is closed. Raises StateInUseError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (self.root / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise StateInUseError(
                f"the state directory {self.root} is in use by a stand-in with process id {holder}; "
                "stop it with `penstock local down`, or give another directory with --state."
            ) from exc
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def publish(self, info: ServerInfo) -> None:
        """Write `server.json`, whole or not at all; only the owner may read it."""
        temporary = self.server_file.with_suffix(".writing")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(asdict(info), indent=1))
        temporary.replace(self.server_file)

    def withdraw(self) -> None:
        """Remove `server.json`."""
        with contextlib.suppress(FileNotFoundError):
            self.server_file.unlink()
