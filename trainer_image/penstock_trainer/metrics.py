"""What a run measured, step by step: a line on stdout at once, a segment in storage at each checkpoint.

    <checkpoint root>/metrics/<attempt>-<number:05d>.jsonl

Object stores cannot append, so segments are never changed. The first line of each says which attempt wrote it and from
where that one continued; the lines after it are as events.measurements_to_jsonl has them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.events import (
    EvaluationEvent,
    Measurement,
    measurements_from_jsonl,
    measurements_to_jsonl,
)
from penstock_trainer.contract.fields import canonical_json, parse_json
from penstock_trainer.storage import Storage, join


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHeader:
    """First line of a segment."""

    attempt: str
    fencing_token: int
    """Orders the attempts."""
    resumed_from: int
    """Step of the checkpoint from which the attempt continued; 0 when it began the run."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What one attempt measured between two checkpoints."""

    header: SegmentHeader
    measurements: tuple[Measurement, ...]


class MetricsLog:
    """Rank 0's measurements of this attempt."""

    def __init__(self, storage: Storage, root_uri: str, owner: Owner, *, resumed_from: int) -> None:
        self._storage = storage
        self._root_uri = root_uri
        self._header = SegmentHeader(
            attempt=owner.attempt, fencing_token=owner.fencing_token, resumed_from=resumed_from
        )
        self._pending: list[Measurement] = []
        self.recorded = 0
        """How much of this attempt's was recorded: a place in it, for `upload`."""
        self._uploaded = 0
        self._segments = 0

    def record(self, event: Measurement) -> None:
        """Print what was measured and keep it for the next segment."""
        sys.stdout.write(event.to_line() + "\n")
        sys.stdout.flush()
        self._pending.append(event)
        self.recorded += 1

    def roll_back(self, step: int) -> None:
        """The run goes back to this step's checkpoint: what was recorded after it is undone. Not while `upload` runs."""
        self._pending = [event for event in self._pending if event.step <= step]
        self.recorded = self._uploaded + len(self._pending)

    def upload(self, until: int) -> None:
        """Store what was recorded since the last call, until the place `until`; another thread may record more meanwhile.

        To be called before the checkpoint is committed: of an attempt that is cut off in between, the steps are
        measured again, whereas after the commit they would be lost. Blocks on storage; raises StorageError, and what
        was recorded is then kept for the next call.
        """
        due = self._pending[: until - self._uploaded]
        if not due:
            return
        name = f"{self._header.attempt}-{self._segments:05d}.jsonl"
        header = f"{canonical_json(self._header)}\n".encode()
        self._storage.write(
            join(self._root_uri, "metrics", name),
            header + measurements_to_jsonl(due),
            if_generation_match=0,
            content_type="application/x-ndjson",
        )
        del self._pending[: len(due)]
        self._uploaded = until
        self._segments += 1

    def joined(self) -> bytes:
        """What the whole run measured as JSON lines, from the segments of all attempts. Blocks on storage.

        Raises StorageError, and ContractError for an object that is not a segment.
        """
        infos = self._storage.list_objects(join(self._root_uri, "metrics") + "/")
        joined = join_segments(parse_segment(self._storage.read(info.uri)) for info in infos)
        return measurements_to_jsonl(joined)


def parse_segment(data: bytes) -> Segment:
    """Raises ContractError when a line is not what a segment has."""
    header, _, lines = data.partition(b"\n")
    return Segment(
        parse_json(SegmentHeader, header, "the segment's first line"), tuple(measurements_from_jsonl(lines))
    )


def join_segments(segments: Iterable[Segment]) -> list[Measurement]:
    """The run that survived, by step, each step and its evaluation once.

    What an attempt measured beyond the step from which a later one continued was undone and is dropped, however late
    it was uploaded.
    """
    kept: dict[tuple[int, bool], Measurement] = {}
    ordered = sorted(segments, key=lambda segment: segment.header.fencing_token)
    for header, of_attempt in itertools.groupby(ordered, key=lambda segment: segment.header):
        kept = {key: one for key, one in kept.items() if one.step <= header.resumed_from}
        kept.update((_place(one), one) for segment in of_attempt for one in segment.measurements)
    return [kept[key] for key in sorted(kept)]


def _place(measurement: Measurement) -> tuple[int, bool]:
    """Where it comes among the others: a step is evaluated after it was logged."""
    return measurement.step, isinstance(measurement, EvaluationEvent)
