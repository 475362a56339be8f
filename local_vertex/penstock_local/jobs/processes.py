"""Processes of tasks and replicas: each in a session of its own, its output kept line by line, none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

# What a process here gets of the stand-in's own environment; a container would get nothing of it.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TZ", "USER")
_INHERITED_PREFIXES = ("PIP_",)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_LINE_BYTES = 64 * 1024
# Everything that a program starts inherits this variable, also what goes into a session of its own, as the workers of
# torchrun do; so it finds what the process group does not.
_MARK = "PENSTOCK_PROCESS_TREE"
_KILL_ROUNDS = 100
# What left the group and cleared its environment keeps the pipe open; its output is not waited for longer than this.
_OUTPUT_DRAIN_SECONDS = 2.0
_KILL_PAUSE_SECONDS = 0.01

LineSink = Callable[[str, str], None]
"""Called with (severity, line) from reader threads."""


def base_environment(python: Path) -> dict[str, str]:
    """The environment under everything else: the interpreter's directory first on PATH, little else inherited."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    return {
        **kept,
        "PATH": f"{python.parent}:{os.environ.get('PATH', _SYSTEM_PATH)}",
        "PYTHONUNBUFFERED": "1",
    }


class ProcessRecord:
    """A directory with one file for each running process group, so that a stand-in that was killed can be tidied up."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)

    def kill_leftovers(self) -> None:
        """Kill what an earlier stand-in on this state left running, and what that had started."""
        for file in self._directory.iterdir():
            if file.read_text() == _start_time(int(file.name)):
                _signal_group(int(file.name), signal.SIGKILL)
            file.unlink(missing_ok=True)
        _kill_marked(f"{_MARK}={self._directory}:")

    def new_mark(self) -> str:
        """A value of the marking variable for one program and all that it starts."""
        return f"{self._directory}:{uuid.uuid4().hex}"

    def add(self, pid: int) -> None:
        """Note a group that runs."""
        (self._directory / str(pid)).write_text(_start_time(pid))

    def remove(self, pid: int) -> None:
        """Note that a group is gone."""
        (self._directory / str(pid)).unlink(missing_ok=True)


class ManagedProcess:
    """A running program and all that it starts. `wait` blocks; `signal` and `stop` may come from any thread."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        sink: LineSink,
        record: ProcessRecord,
    ) -> None:
        """Start it. Raises OSError when the program cannot be started."""
        self._mark = record.new_mark()
        self._process = subprocess.Popen(
            list(argv),
            env={**env, _MARK: self._mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._sink = sink
        self._record = record
        record.add(self.pid)
        self._lock = threading.Lock()
        self._reaped = False
        self._drained = threading.Event()
        self._ended = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_lines, args=(stream, severity), daemon=True)
            for stream, severity in ((self._process.stdout, "INFO"), (self._process.stderr, "ERROR"))
        ]
        for thread in (*self._readers, threading.Thread(target=self._watch, daemon=True)):
            thread.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group and session."""
        return self._process.pid

    def wait(self) -> int:
        """Block until the program ends and its output is read; returns its exit code as a container shows it.

        What it started and left running is killed, as the end of a container would. A program that a signal ended
        gives 128 + the signal's number. Output that comes later than 2 s after the end, from what could not be found
        to be killed, is dropped.
        """
        self._ended.wait()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> bool:
        """Send a signal to the whole group; False when the program has ended."""
        with self._lock:
            if not self._reaped:
                _signal_group(self.pid, number)
            return not self._reaped

    def tree(self) -> list[int]:
        """Process ids of the program and of all that it started and that still runs."""
        return _marked(f"{_MARK}={self._mark}\0")

    def vanish(self) -> None:
        """SIGKILL to the program and all that it started, at once and without notice, as when its machine is gone."""
        with self._lock:
            if not self._reaped:
                self._kill_tree()

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to the program, as a container runtime does; SIGKILL to all of it when the grace is over."""
        with self._lock:
            if not self._reaped:
                os.kill(self.pid, signal.SIGTERM)
        if not self._ended.wait(grace_seconds):
            with self._lock:
                if not self._reaped:
                    self._kill_tree()

    def _watch(self) -> None:
        # WNOWAIT leaves the zombie in place: its process id still names its group, and nobody else's.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill_tree()
            self._process.wait()
            self._reaped = True
        deadline = time.monotonic() + _OUTPUT_DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._drained.set()
        self._record.remove(self.pid)
        self._ended.set()

    def _kill_tree(self) -> None:
        _signal_group(self.pid, signal.SIGKILL)
        _kill_marked(f"{_MARK}={self._mark}\0")

    def _read_lines(self, stream: IO[bytes], severity: str) -> None:
        with stream:
            while (line := stream.readline(_MAX_LINE_BYTES)) and not self._drained.is_set():
                text = line.decode(errors="replace").rstrip("\r\n")
                if text:
                    self._sink(severity, text)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _kill_marked(mark: str) -> None:
    """Kill every process with `mark` in its environment, in rounds: one may have started another meanwhile."""
    for _ in range(_KILL_ROUNDS):
        marked = _marked(mark)
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_PAUSE_SECONDS)


def _marked(mark: str) -> list[int]:
    """Processes with `mark` in their environment."""
    return [int(environ.parent.name) for environ in _environs() if mark.encode() in _read(environ)]


def _environs() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*/environ")


def _read(environ: Path) -> bytes:
    try:
        return environ.read_bytes()
    except OSError:
        return b""  # it has ended, or is another user's


def _start_time(pid: int) -> str:
    """When the kernel started the process (field 22 of /proc/PID/stat): tells a process from a later one of its id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
