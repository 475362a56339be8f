"""The profiler's window within a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from penstock_trainer.contract.config import ObserveConfig
from penstock_trainer.observe.profile_window import ProfileWindow


def train(root: Path, *, first: int, last: int, start: int, steps: int = 2) -> list[Path]:
    """Steps first to last, each with one product; the traces that are left."""
    config = ObserveConfig(profile_start=start, profile_steps=steps)
    window = ProfileWindow(config, root_uri=root.as_uri(), attempt="a", rank=3, device=torch.device("cpu"))
    for step in range(first, last + 1):
        window.begin_step(step)
        torch.ones(2, 2) @ torch.ones(2, 2)
    window.close()
    return sorted((root / "profile").iterdir()) if (root / "profile").exists() else []


def products(trace: Path) -> int:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_it_records_the_steps_asked_for(tmp_path: Path) -> None:
    (trace,) = train(tmp_path, first=1, last=8, start=3)
    assert trace.name == "a-rank3-step3.json.gz"
    assert products(trace) == 2


def test_a_run_that_ends_within_the_window_leaves_what_was_recorded(tmp_path: Path) -> None:
    (trace,) = train(tmp_path, first=1, last=4, start=4)
    assert products(trace) == 1


@pytest.mark.parametrize(("first", "start"), [(1, 0), (5, 3), (1, 9)])
def test_nothing_is_recorded_otherwise(tmp_path: Path, first: int, start: int) -> None:
    assert train(tmp_path, first=first, last=8, start=start) == []


def test_a_trace_that_cannot_be_stored_is_no_end_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("in the way")
    config = ObserveConfig(profile_start=1, profile_steps=1)
    window = ProfileWindow(
        config, root_uri=tmp_path.as_uri(), attempt="a", rank=0, device=torch.device("cpu")
    )
    window.begin_step(1)
    window.begin_step(2)
    assert "the profile was not written" in caplog.text
