"""Event files for TensorBoard.

Objects cannot be appended, so what was shown between two uploads is a file of its own; TensorBoard reads all files of a
directory in the order of their names. The first of an attempt begins with a session's start, which has TensorBoard drop
what an earlier attempt showed of the same steps and later ones.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock_trainer.contract.events import EvaluationEvent, StepEvent
from penstock_trainer.storage import join, storage_for

_NOT_CURVES = {"step", "steps", "best"}


@dataclass(frozen=True, slots=True)
class Shown:
    """One point of some curves."""

    time: float
    """Seconds since the epoch."""
    step: int
    values: Mapping[str, float]
    """By tag; empty: a session starts here."""


class TensorBoard:
    """See Tracker. What was shown is kept in memory until it is uploaded."""

    def __init__(self, directory: str) -> None:
        """`directory`: gs:// or file:// URI, or a path."""
        self._uri = directory if "://" in directory else Path(directory).absolute().as_uri()
        self._shown: list[Shown] = []
        self._last_step: int | None = None
        self._name = ""

    def step(self, event: StepEvent) -> None:
        """See Tracker.step: `train/<field of StepEvent>`."""
        if self._last_step is None or event.step <= self._last_step:
            self._shown.append(Shown(time.time(), event.step, {}))
        self._last_step = event.step
        self._show("train", event.step, asdict(event))

    def evaluation(self, event: EvaluationEvent) -> None:
        """See Tracker.evaluation: `evaluation/<field of EvaluationEvent>`."""
        self._show("evaluation", event.step, asdict(event))

    def upload(self) -> None:
        """See Tracker.upload. Raises StorageError; what was shown is then kept for the next call."""
        shown = self._shown[:]
        if not shown:
            return
        # The name orders the files; a time alone could come twice.
        name = max(f"events.out.tfevents.{time.time_ns():020d}.penstock", self._name + "+")
        storage_for(self._uri).write(join(self._uri, name), _event_file(shown), if_generation_match=0)
        self._name = name
        del self._shown[: len(shown)]

    def close(self) -> None:
        """See Tracker.close."""
        self.upload()

    def _show(self, group: str, step: int, fields: Mapping[str, object]) -> None:
        values = {
            f"{group}/{name}": float(value)
            for name, value in fields.items()
            if name not in _NOT_CURVES and isinstance(value, (int, float))
        }
        self._shown.append(Shown(time.time(), step, values))


def _event_file(shown: Sequence[Shown]) -> bytes:
    """As TensorBoard reads it. tensorboard is imported here: it takes half a second, which no first step waits for."""
    event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    record_writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
    event, session, summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
    body = io.BytesIO()
    writer = record_writer.RecordWriter(body)
    events = [event(wall_time=shown[0].time, file_version="brain.Event:2")]
    for each in shown:
        values = [summary.Value(tag=tag, simple_value=value) for tag, value in each.values.items()]
        content = (
            {"summary": summary(value=values)} if values else {"session_log": session(status=session.START)}
        )
        events.append(event(wall_time=each.time, step=each.step, **content))
    for record in events:
        writer.write(record.SerializeToString())
    return body.getvalue()
