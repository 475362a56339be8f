"""Segments, and the one run that they are joined into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.metrics import MetricsLog, Segment, SegmentHeader, join_segments, parse_segment
from penstock_trainer.storage import FileStorage


def event(step: int, loss: float) -> StepEvent:
    return StepEvent(
        step=step, steps=100, loss=loss, learning_rate=0.1, grad_norm=1.0, tokens_per_second=10.0
    )


def segment(token: int, resumed_from: int, steps: range, loss: float) -> Segment:
    header = SegmentHeader(attempt=f"a{token}", fencing_token=token, resumed_from=resumed_from)
    return Segment(header, tuple(event(step, loss) for step in steps))


def losses(segments: list[Segment]) -> dict[int, float]:
    joined = join_segments(segments)
    assert [step.step for step in joined] == sorted({step.step for step in joined})
    return {step.step: step.loss for step in joined}


def test_what_a_later_attempt_undid_is_dropped_in_whatever_order_segments_are_read() -> None:
    # The first attempt uploaded up to 30; the second found step 20 the newest whole one and was cut off at 25; the
    # third, which measured nothing before its end, continued from 20 as well.
    segments = [
        segment(3, 20, range(21, 23), 0.3),
        segment(1, 0, range(1, 11), 0.1),
        segment(1, 0, range(11, 31), 0.1),
        segment(2, 20, range(21, 26), 0.2),
    ]
    expected = dict.fromkeys(range(1, 21), 0.1) | {21: 0.3, 22: 0.3}
    assert losses(segments) == expected
    assert losses(segments[::-1]) == expected


def test_a_run_that_began_anew_keeps_nothing_of_the_one_before() -> None:
    assert losses([segment(1, 0, range(1, 9), 0.1), segment(2, 0, range(1, 3), 0.2)]) == {1: 0.2, 2: 0.2}


@pytest.mark.parametrize("data", [b"", b"{", b'{"attempt": "a"}', b"\xff\n"])
def test_what_is_no_segment_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_segment(data)
    header = b'{"attempt": "a", "fencing_token": 1, "resumed_from": 0}\n'
    assert parse_segment(header).measurements == ()
    with pytest.raises(ContractError, match="line 1 of the measurements is not JSON"):
        parse_segment(header + b'{"step": ')


def test_segments_are_uploaded_once_and_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path.as_uri()
    first = MetricsLog(FileStorage(), root, Owner(attempt="aa", fencing_token=1), resumed_from=0)
    for step in (1, 2, 3):
        first.record(event(step, 1.0 / step))
        if step == 2:
            first.upload(first.recorded)
            first.upload(first.recorded)  # nothing new: no empty segment
    first.upload(first.recorded)
    second = MetricsLog(FileStorage(), root, Owner(attempt="bb", fencing_token=2), resumed_from=2)
    second.record(event(3, 0.25))
    second.upload(second.recorded)

    names = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert names == ["aa-00000.jsonl", "aa-00001.jsonl", "bb-00000.jsonl"]
    joined = [json.loads(line) for line in second.joined().splitlines()]
    assert [(line["step"], line["loss"]) for line in joined] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert set(joined[0]) == set(StepEvent.__slots__)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in printed] == ["step"] * 4
