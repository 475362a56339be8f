"""What the processes of a run that is killed at exact or at random moments do besides their work.

Nothing of the trainer is replaced: with `storm_env` in its environment, each interpreter of the run begins with `install`
(by storm_site/sitecustomize.py). Ranks that are started again wait until the test has looked at what those before have
left, and a moment is one of the interpreter's own audit events (os.link, os.mkdir, ...), which are raised before the
system is called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

Role = Literal["launcher", "rank", "writer"]

_SITE = Path(__file__).with_name("storm_site")
_MODULES: Mapping[str, Role] = {
    "penstock_trainer": "launcher",
    "penstock_trainer.rank": "rank",
    "penstock_trainer.checkpoints.writer": "writer",
}
_GATE_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Storm:
    """Who is killed, and when."""

    directory: str
    """No other run has it. Its file `go-<n>` lets the ranks of the n-th restart begin, see `open_gate`."""
    victim: int = -1
    """Rank that is killed in the first round. -1: none, by these processes themselves."""
    moment: list[tuple[list[str], str]] = field(default_factory=list)
    """Events of rank 0, or of its writer, each as its possible names and a text in its arguments; the kill comes with the
    last."""

    @property
    def env(self) -> dict[str, str]:
        """What makes a launcher and its processes part of the storm. For a ChildProcess."""
        return {
            "STORM": json.dumps(asdict(self)),
            "PYTHONPATH": os.pathsep.join([str(_SITE), *(entry for entry in sys.path if entry)]),
        }

    def open_gate(self, restart: int) -> None:
        """Let the ranks of a round that follows `restart - 1` others begin."""
        (Path(self.directory) / f"go-{restart}").touch()

    def processes(self) -> list[Process]:
        """Those of the run that live now."""
        return list(self._processes())

    def _processes(self) -> Iterator[Process]:
        mark = f"STORM={json.dumps(asdict(self))}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # it has ended, or is not ours
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    if mark in environ:
                        yield Process.of(int(entry.name), environ)


@dataclass(frozen=True, slots=True)
class Process:
    """Of a run."""

    pid: int
    role: Role | None
    """None while it is about to become one of them."""
    rank: int
    """Of a launcher that of its node."""

    @classmethod
    def of(cls, pid: int, environ: Sequence[bytes]) -> Self:
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        [rank] = [entry[5:] for entry in environ if entry.startswith(b"RANK=")] or [b"0"]
        return cls(pid, _role_of(argv), int(rank))


def install() -> None:
    """Make this process part of the storm that the environment names."""
    storm = Storm(**json.loads(os.environ["STORM"]))
    role, restart = _role_of(sys.orig_argv), os.environ.get("PENSTOCK_RESTART", "0")
    if role == "rank" and restart != "0":
        while not (Path(storm.directory) / f"go-{restart}").exists():
            time.sleep(_GATE_POLL_SECONDS)
    if role in ("rank", "writer") and restart == "0" and storm.victim >= 0:
        rank = int(os.environ["RANK"])
        if role == "rank":
            (Path(storm.directory) / f"rank-{rank}").write_text(str(os.getpid()))
        if rank == 0:
            _await_moment(storm)


def _await_moment(storm: Storm) -> None:
    waiting = list(storm.moment)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if not waiting:
            return
        names, text = waiting[0]
        if event in names and text in " ".join(map(str, arguments)):
            del waiting[0]
            if not waiting:
                _kill(storm)

    sys.addaudithook(hear)


def _kill(storm: Storm) -> None:
    os.kill(int((Path(storm.directory) / f"rank-{storm.victim}").read_text()), signal.SIGKILL)
    if storm.victim == 0:
        # A writer ends with its rank, but not within the same microsecond: what it was about to do must not be done.
        while True:
            signal.pause()


def _role_of(argv: Sequence[str]) -> Role | None:
    """By the module that the interpreter runs. The program that becomes a rank is given the same, after its own file."""
    if len(argv) < 3 or argv[1] != "-m":
        return None
    return _MODULES.get(argv[2])
