"""The structured lines that a run writes to stdout, one JSON object a line; Cloud Logging keeps them as fields.

`message` and `severity` are the names under which Cloud Logging shows a line; `event` says which class it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from penstock_trainer.contract.fields import ContractError, canonical_json, from_dict, load_json


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
    """Targets over all ranks per second since the line before, with whatever else was done between the two: checkpoints
    and evaluations."""
    samples_per_second: float | None = None
    """Over all ranks, of the same time. This field and those below are None where they are not known."""
    mfu: float | None = None
    """Model FLOPs utilisation of the same time, from 0 to 1: tokens_per_second times the model's FLOPs per token, over
    observe.peak_tflops of all ranks."""
    step_seconds: float | None = None
    """Mean wall time of a step since the line before, with what else was done; so are the seconds below. They are those
    of the slowest rank, or of rank 0 where that is not known, but for the median's."""
    data_seconds: float | None = None
    """The rank waited for its batches."""
    forward_seconds: float | None = None
    """All micro-batches of a step. On CUDA the device's time, as of the two below."""
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    """Clipping and update."""
    communication_seconds: float | None = None
    """Part of forward, backward and optimizer, not beside them. Over gloo, the rank's main thread slept in a collective
    (exposed wait). Over NCCL, the time of its kernels added up, with or without computation beside them, waiting for
    other ranks included; told once a minute at most."""
    checkpoint_seconds: float | None = None
    """Saving, of the checkpoints before this line: what is saved after a step is told in the next line."""
    evaluation_seconds: float | None = None
    slowest_rank: int | None = None
    """The rank whose data and computation took longest, communication left out: the one that others wait for."""
    slowest_rank_seconds: float | None = None
    """Its data and computation, communication left out."""
    median_rank_seconds: float | None = None
    """The same of the median rank."""
    peak_memory_bytes: int | None = None
    """The most of any rank since its start. On CUDA what torch had allocated on the device, on CPU what the process had
    resident."""
    accelerator_utilization: float | None = None
    """Mean over ranks, from 0 to 1: share of NVML's last sample period (1 s at most) in which a kernel ran."""
    skipped_steps: int = 0
    """Since the line before, steps whose update was left out."""

    def told_loss(self, digits: int) -> str:
        """The loss for people to read."""
        return "not finite" if self.loss is None else f"{self.loss:.{digits}f}"

    def to_line(self) -> str:
        """One line of JSON, without a newline."""
        mfu = "" if self.mfu is None else f" mfu {self.mfu:.1%}"
        speed = f"{self.tokens_per_second:,.0f} tokens/s{mfu}"
        message = f"step {self.step}/{self.steps} loss {self.told_loss(4)} {speed}"
        return json.dumps({"severity": "INFO", "message": message, "event": "step", **asdict(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEvent:
    """How good the model is on the held-out split, written by rank 0 after each evaluation."""

    step: int
    loss: float
    """Mean over the held-out targets, nats each."""
    accuracy: float
    """Share of the targets that the model predicts."""
    targets: int
    best: bool
    """By the run's metric, the best step so far."""
    seconds: float

    def to_line(self) -> str:
        """One line of JSON, without a newline."""
        best = ", the best so far" if self.best else ""
        message = f"step {self.step} held-out loss {self.loss:.4f} accuracy {self.accuracy:.4f}{best}"
        return json.dumps({"severity": "INFO", "message": message, "event": "evaluation", **asdict(self)})


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


Measurement = StepEvent | EvaluationEvent
"""What is kept of a run."""
Event = Measurement | ProgressEvent
_KINDS: dict[str, type[StepEvent] | type[EvaluationEvent] | type[ProgressEvent]] = {
    "step": StepEvent,
    "evaluation": EvaluationEvent,
    "progress": ProgressEvent,
}


def parse_event(payload: Any) -> Event | None:
    """The event in a log entry's payload (a dict of fields, or the line as text), or None when it is not one."""
    if isinstance(payload, str):
        try:
            payload = json.loads(payload)
        except json.JSONDecodeError:
            return None
    if not isinstance(payload, dict):
        return None
    kind = _KINDS.get(str(payload.get("event")))
    if kind is None:
        return None
    try:
        # Cloud Logging keeps every number as a double: 100 comes back as 100.0.
        return from_dict(kind, {name: payload[name] for name in kind.__slots__ if name in payload})
    except ContractError:
        return None


def measurements_to_jsonl(measurements: Iterable[Measurement]) -> bytes:
    """The file in which an export keeps what its run measured: one JSON object a line.

    A logged step is the fields of StepEvent alone, an evaluation those of EvaluationEvent and `"event": "evaluation"`.
    """
    return "".join(canonical_json(_to_fields(one)) + "\n" for one in measurements).encode()


def measurements_from_jsonl(data: bytes) -> list[Measurement]:
    """Read what `measurements_to_jsonl` wrote. Raises ContractError when a line is something else."""
    return [
        _from_fields(load_json(line, f"line {number} of the measurements"))
        for number, line in enumerate(data.splitlines(), start=1)
    ]


def _to_fields(measurement: Measurement) -> dict[str, Any]:
    event = {"event": "evaluation"} if isinstance(measurement, EvaluationEvent) else {}
    return {**event, **asdict(measurement)}


def _from_fields(told: Any) -> Measurement:
    if isinstance(told, dict) and told.get("event") == "evaluation":
        return from_dict(EvaluationEvent, {name: told[name] for name in told if name != "event"})
    return from_dict(StepEvent, told)
