"""The arms themselves, for a few steps."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cpu_steps import AGAIN, BARE, OURS, run


def test_our_loop_and_the_bare_one_run_to_their_end_in_turns(tmp_path: Path) -> None:
    outcome = run(tmp_path, pairs=2, seed=0, with_frameworks=False)
    for name in (OURS, BARE, AGAIN):
        assert name not in outcome.errors
        assert len(outcome.costs[name].step_seconds) == 2
        assert (outcome.costs[name].step_seconds > 0).all()
