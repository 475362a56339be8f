"""The structured lines that a run writes to stdout, one JSON object a line; Cloud Logging keeps them as fields.

`message` and `severity` are the names under which Cloud Logging shows a line; `event` says which class it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from penstock_trainer.contract.fields import ContractError, canonical_json, from_dict, parse_json


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """Progress of training, written by rank 0 every `log_interval` steps."""

    step: int
    steps: int
    loss: float | None
    """Mean over the targets of this step, nats each; None when it was not finite."""
    learning_rate: float
    grad_norm: float | None
    """Global norm before clipping; None when it was not finite, and the step's update was left out."""
    tokens_per_second: float
    """Over all ranks, since the line before."""

    def told_loss(self, digits: int) -> str:
        """The loss for people to read."""
        return "not finite" if self.loss is None else f"{self.loss:.{digits}f}"

    def to_line(self) -> str:
        """One line of JSON, without a newline."""
        message = f"step {self.step}/{self.steps} loss {self.told_loss(4)} {self.tokens_per_second:,.0f} tokens/s"
        return json.dumps({"severity": "INFO", "message": message, "event": "step", **asdict(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressEvent:
    """Progress of any other work, such as staging: `done` of `total` units."""

    done: float
    total: float
    unit: str

    def to_line(self) -> str:
        """One line of JSON, without a newline."""
        message = f"{self.done:,.0f}/{self.total:,.0f} {self.unit}"
        return json.dumps({"severity": "INFO", "message": message, "event": "progress", **asdict(self)})


def parse_event(payload: Any) -> StepEvent | ProgressEvent | None:
    """The event in a log entry's payload (a dict of fields, or the line as text), or None when it is not one."""
    if isinstance(payload, str):
        try:
            payload = json.loads(payload)
        except json.JSONDecodeError:
            return None
    if not isinstance(payload, dict):
        return None
    kinds: dict[str, type[StepEvent] | type[ProgressEvent]] = {"step": StepEvent, "progress": ProgressEvent}
    kind = kinds.get(str(payload.get("event")))
    if kind is None:
        return None
    try:
        # Cloud Logging keeps every number as a double: 100 comes back as 100.0.
        return from_dict(kind, {name: payload[name] for name in kind.__slots__ if name in payload})
    except ContractError:
        return None


def steps_to_jsonl(steps: Iterable[StepEvent]) -> bytes:
    """The file in which an export keeps its run's logged steps: one JSON object a line, the fields of StepEvent."""
    return "".join(canonical_json(step) + "\n" for step in steps).encode()


def steps_from_jsonl(data: bytes) -> list[StepEvent]:
    """Read what `steps_to_jsonl` wrote. Raises ContractError when a line is something else."""
    return [
        parse_json(StepEvent, line, f"line {number} of the logged steps")
        for number, line in enumerate(data.splitlines(), start=1)
    ]
