"""The line of a step, of today and of runs before it had all its fields."""

from __future__ import annotations

import json
from dataclasses import replace

from penstock_trainer.contract.events import StepEvent, measurements_from_jsonl, parse_event

STEP = StepEvent(
    step=7, steps=9, loss=2.5, learning_rate=0.1, grad_norm=1.0, tokens_per_second=12345.6, mfu=0.4321
)


def message(event: StepEvent) -> str:
    told: str = json.loads(event.to_line())["message"]
    return told


def test_the_message_is_short_and_has_the_utilisation_only_where_it_is_known() -> None:
    assert message(STEP) == "step 7/9 loss 2.5000 12,346 tokens/s mfu 43.2%"
    assert message(replace(STEP, mfu=None)) == "step 7/9 loss 2.5000 12,346 tokens/s"


def test_lines_of_runs_before_these_fields_are_read() -> None:
    old = b'{"step":1,"steps":2,"loss":3.5,"learning_rate":0.1,"grad_norm":1.0,"tokens_per_second":10.0}\n'
    (step,) = measurements_from_jsonl(old)
    assert step == StepEvent(
        step=1, steps=2, loss=3.5, learning_rate=0.1, grad_norm=1.0, tokens_per_second=10.0
    )


def test_whole_numbers_come_back_whole_from_cloud_logging() -> None:
    sent = replace(STEP, slowest_rank=3, peak_memory_bytes=2**40, skipped_steps=2)
    payload = {
        name: float(value) if isinstance(value, int) else value
        for name, value in json.loads(sent.to_line()).items()
    }
    assert parse_event(payload) == sent
