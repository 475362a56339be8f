"""The rank processes of one node: started, watched, signalled, and never left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from penstock_trainer.heartbeat import TRACEBACK_SIGNAL, read_pulse
from penstock_trainer.observe.structured_logs import structured
from penstock_trainer.outcome import RankEnd, Silence, ThreadState, read_end

_SHIM = str(Path(__file__).with_name("die_with_parent.py"))
# A process that left the rank's group keeps its pipe open; its output is not waited for longer than this.
_OUTPUT_DRAIN_SECONDS = 2.0


class RankProcess:
    """One rank in a session of its own. Constructed in the main thread only; see die_with_parent."""

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        result_file: Path | None,
        heartbeat_file: Path | None,
        on_end: Callable[[RankEnd], None],
    ) -> None:
        self.rank = rank
        self._result_file = result_file
        self._heartbeat_file = heartbeat_file
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended = False
        self._stopped = False
        self._silence: Silence | None = None
        # Rank 0's lines are the job's; the others' are marked on their way through a pipe.
        output = None if rank == 0 else subprocess.PIPE
        self._process = subprocess.Popen(
            # -I -S: the shim needs nothing of the environment and starts in 15 ms.
            [sys.executable, "-I", "-S", _SHIM, str(os.getpid()), *argv],
            env=dict(env),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=_copy_lines, args=(rank, source, target), daemon=True)
            for source, target in (
                (self._process.stdout, sys.stdout),
                (self._process.stderr, sys.stderr),
            )
            if source is not None
        ]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._readers, self._watcher):
            thread.start()

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone; its own helpers are the rank's to stop. Nothing happens once it ended."""
        with self._lock:
            if not self._ended:
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the rank's whole process group. Nothing happens once it ended."""
        with self._lock:
            if not self._ended:
                self._stopped = True
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_heard(self) -> Silence | None:
        """What was last heard of the rank; None before it has beaten, once it ended, and if it was given up."""
        with self._lock:
            if self._ended or self._silence or self._heartbeat_file is None:
                return None
            pulse = read_pulse(self._heartbeat_file)
            if pulse is None:
                return None
            since = time.time() - pulse.age_seconds
            return Silence(pulse=pulse, main_thread=_thread_state(self._process.pid), since=since)

    def give_up(self, silence: Silence) -> None:
        """Have the rank write its tracebacks, if it still can; its end will be told as this silence. Kills nothing."""
        self._silence = silence
        self.signal(TRACEBACK_SIGNAL)

    def join(self) -> None:
        """Block until the end has been reported to `on_end`."""
        self._watcher.join()

    def _watch(self) -> None:
        # WNOWAIT leaves the zombie in place: its process id still names its group, and nobody else's.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        ended_at = time.time()
        with self._lock:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # helpers that the rank left behind
            returncode = self._process.wait()
            self._ended = True
        for reader in self._readers:
            reader.join(_OUTPUT_DRAIN_SECONDS)
        self._on_end(
            read_end(
                self.rank,
                returncode,
                self._result_file,
                stopped=self._stopped,
                ended_at=ended_at,
                silence=self._silence,
            )
        )


class Ranks:
    """All ranks of this node. As a context manager it kills, on exit, those that are left and waits for them."""

    def __init__(self, events: queue.SimpleQueue[RankEnd | int]) -> None:
        self._events = events
        self._processes: list[RankProcess] = []

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        result_file: Path | None,
        heartbeat_file: Path | None = None,
    ) -> None:
        """Start one rank; its RankEnd will be put into the queue of events."""
        self._processes.append(
            RankProcess(
                rank,
                argv,
                env,
                result_file=result_file,
                heartbeat_file=heartbeat_file,
                on_end=self._events.put,
            )
        )

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._processes)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that is left."""
        for process in self._processes:
            process.signal(number)

    def kill(self) -> None:
        """SIGKILL what is left."""
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for process in self._processes:
            process.join()


def _thread_state(pid: int) -> ThreadState:
    """Of the main thread of a process that has not been reaped: man 5 proc, the letter after the name in its stat."""
    letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    states: dict[str, ThreadState] = {"T": "stopped", "t": "stopped", "R": "running"}
    return states.get(letter, "waiting")


def _copy_lines(rank: int, source: IO[bytes], target: IO[str]) -> None:
    """Copy lines until the pipe is closed, each with the rank in front unless it is a structured one."""
    mark = f"[rank {rank}] ".encode()
    with source:
        for line in source:
            text = line.rstrip(b"\n")
            # One write, so that two ranks' lines do not mix.
            target.buffer.write((text if structured(text.decode(errors="replace")) else mark + text) + b"\n")  # type: ignore[attr-defined]  # IO[str] of a process has one
            target.flush()
