from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_trainer.checkpoints.retention import Retention


@pytest.mark.parametrize(
    ("last", "every", "best", "dropped"),
    [
        (0, 0, False, []),
        (0, 20, True, []),
        (2, 0, False, [10, 20, 30, 40]),
        (2, 0, True, [10, 20, 40]),
        (2, 20, False, [10, 30]),
        (2, 20, True, [10]),
        (6, 0, False, []),
        (9, 0, False, []),
    ],
)
def test_what_is_kept_for_no_reason_is_dropped(last: int, every: int, best: bool, dropped: list[int]) -> None:
    retention = Retention(last=last, every=every, best=best)
    assert retention.dropped([60, 10, 50, 20, 40, 30], best=30) == dropped


@settings(deadline=None)
@given(
    steps=st.sets(st.integers(1, 10_000)),
    last=st.integers(1, 5),
    every=st.integers(0, 100),
    best=st.none() | st.integers(1, 10_000),
)
def test_the_newest_stay_and_a_second_look_drops_nothing_more(
    steps: set[int], last: int, every: int, best: int | None
) -> None:
    retention = Retention(last=last, every=every, best=True)
    dropped = retention.dropped(steps, best=best)
    kept = steps - set(dropped)
    assert dropped == sorted(dropped)
    assert kept >= set(sorted(steps)[-last:])
    assert best not in dropped
    assert retention.dropped(kept, best=best) == []
