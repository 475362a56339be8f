"""Signs of life of a rank, which its launcher looks at: a record in a file that both have mapped into memory.

A rank that waits in a collective for one that will never come, or that loops in its data loading, looks well from
outside: its process lives. What it no longer does is to begin a step. Both read CLOCK_MONOTONIC, which the processes of a
machine share. No torch here, because the launcher runs without.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["starting", "restoring", "training", "evaluating", "saving", "exporting"]
"""What a rank is doing, in coarse terms: see WATCHED."""

WATCHED: frozenset[Phase] = frozenset({"training", "evaluating"})
"""Phases in which a long silence means a hang: their waits are for ranks, and those have a timeout. The others wait for
storage, or for compilers and for data that is opened the first time, and say nothing for as long as that takes."""

TRACEBACK_SIGNAL = signal.SIGUSR1
"""Has a rank that beats write the Python stacks of all its threads to stderr. Works also while it waits in C++."""

_PHASES: tuple[Phase, ...] = get_args(Phase)

_RECORD = struct.Struct("<QQQdB")
"""Beats in all, step, beats in this phase of this step, time.monotonic(), index of the phase; then the CRC-32 of it."""
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = _RECORD.size + _CHECKSUM.size
FILE_BYTES = 2 * _SLOT_BYTES
"""Two records, written in turn: whatever happens during a beat, the one before can still be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last beat of a rank."""

    phase: Phase
    step: int
    beats: int
    """In this phase of this step, this one included. Of ranks that do the same, the one with fewer is behind."""
    age_seconds: float


class Heart:
    """A rank's side. For one thread: the one whose progress is the run's."""

    def __init__(self, file: Path | None) -> None:
        """`file` is created; None: no launcher listens, and beats do nothing. Takes TRACEBACK_SIGNAL where one does.

        Raises OSError when the file cannot be written.
        """
        self._total = self._beats = 0
        self._last: tuple[Phase, int] | None = None
        self._record: mmap.mmap | None = None
        if file is not None:
            file.write_bytes(bytes(FILE_BYTES))  # room is taken here; a full disk would be SIGBUS later
            with file.open("r+b") as opened:
                self._record = mmap.mmap(opened.fileno(), FILE_BYTES)
            faulthandler.register(TRACEBACK_SIGNAL, file=2, all_threads=True)

    def beat(self, phase: Phase, step: int) -> None:
        """Say that the rank lives and what it begins. Takes about a microsecond."""
        if self._record is None:
            return
        self._beats = self._beats + 1 if self._last == (phase, step) else 1
        self._last = (phase, step)
        self._total += 1
        told = _RECORD.pack(self._total, step, self._beats, time.monotonic(), _PHASES.index(phase))
        at = self._total % 2 * _SLOT_BYTES
        self._record[at : at + _SLOT_BYTES] = told + _CHECKSUM.pack(zlib.crc32(told))


def read_pulse(file: Path) -> Pulse | None:
    """The last beat, or None before the first. What is torn or was not written by a Heart counts for nothing."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    slots = [content[at : at + _SLOT_BYTES] for at in (0, _SLOT_BYTES)]
    told = [record for slot in slots if (record := _parse(slot)) is not None]
    if not told:
        return None
    _, step, beats, at, phase = max(told)
    return Pulse(phase=_PHASES[phase], step=step, beats=beats, age_seconds=max(0.0, time.monotonic() - at))


def _parse(slot: bytes) -> tuple[int, int, int, float, int] | None:
    if len(slot) != _SLOT_BYTES:
        return None
    told = slot[: _RECORD.size]
    if _CHECKSUM.unpack(slot[_RECORD.size :]) != (zlib.crc32(told),):
        return None
    total, step, beats, at, phase = _RECORD.unpack(told)
    return (total, step, beats, at, phase) if phase < len(_PHASES) else None
