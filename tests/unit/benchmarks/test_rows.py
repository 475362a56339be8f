"""The arithmetic of benchmarks, and the format in which their results are kept."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rows import (
    Machine,
    Row,
    append,
    compare,
    exit_code,
    median_interval,
    meets,
    ratio_interval,
    table,
)

MACHINE = Machine(hardware="2 x Some CPU, torch 0", commit="0123456789ab-dirty")
# design.md, section Benchmarks.
FIELDS = [
    "metric",
    "ours",
    "peer",
    "peer_name",
    "unit",
    "ratio",
    "low",
    "high",
    "target",
    "ok",
    "hardware",
    "commit",
]


def row(ours: float, peer: float | None, target: str = "") -> Row:
    """Of ten equal pairs, so that the interval is the ratio."""
    return compare(
        "throughput",
        np.full(10, ours),
        None if peer is None else np.full(10, peer),
        peer_name="them",
        unit="tokens/s",
        target=target,
        machine=MACHINE,
    )


def test_the_ratio_is_ours_over_the_peer() -> None:
    assert row(99.0, 90.0).ratio == pytest.approx(1.1)


def test_the_interval_holds_the_true_ratio_of_noisy_pairs_and_little_else() -> None:
    generator = np.random.default_rng(1)
    # The disturbance is common to a pair, as on a busy machine; the ratio of the medians is 0.9.
    common = generator.lognormal(sigma=0.2, size=400)
    ours, peer = (
        0.9 * common * generator.normal(1, 0.01, 400),
        common * generator.normal(1, 0.01, 400),
    )

    low, high = ratio_interval(ours, peer)

    assert low < 0.9 < high
    assert high - low < 0.02


def test_pairs_are_drawn_as_pairs() -> None:
    """Drawn apart, samples that differ between rounds by a factor of 100 would not show that their ratio is constant."""
    peer = np.geomspace(1, 100, 101)

    low, high = ratio_interval(0.95 * peer, peer)

    assert (low, high) == pytest.approx((0.95, 0.95))


def test_an_outlier_moves_neither_median_nor_interval() -> None:
    ours = np.r_[np.full(199, 100.0), 1e9]

    assert ratio_interval(ours, np.full(200, 100.0)) == (1.0, 1.0)
    assert median_interval(ours) == (100.0, 100.0)


@pytest.mark.parametrize(
    ("target", "interval", "expected"),
    [
        (">= 0.98", (0.98, 1.2), True),
        (">= 0.98", (0.97, 1.2), False),
        ("<= 1.3", (1.1, 1.3), True),
        ("<= 1.3", (1.1, 1.31), False),
        ("", (0.1, 9.0), True),
        ("", None, False),
        (">= 0.98", None, False),
    ],
)
def test_a_target_is_met_by_the_worse_end_of_the_interval(
    target: str, interval: tuple[float, float] | None, expected: bool
) -> None:
    assert meets(target, interval) is expected


def test_a_target_without_a_sign_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target '0\.98' has no sign: allowed are '>= x' and '<= x'"):
        meets("0.98", (1.0, 1.0))


def test_samples_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="ours has 3 and the peer 2"):
        ratio_interval(np.ones(3), np.ones(2))


def test_a_row_whose_peer_did_not_run_is_not_ok() -> None:
    absent = row(1.0, None)

    assert not absent.ok
    assert (absent.peer, absent.ratio, absent.low, absent.high) == (None, None, None, None)
    assert "did not run" in table([absent])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1.0, 1.0, ">= 0.98"), row(1.0, 2.0)], 0),
        ([row(1.0, 1.0, ">= 0.98"), row(1.0, 2.0, ">= 0.98")], 1),
        ([row(1.0, None, ">= 0.98")], 1),
        ([row(1.0, None)], 0),
    ],
)
def test_only_a_target_that_is_missed_fails_the_suite(rows: list[Row], expected: int) -> None:
    assert exit_code(rows) == expected


def test_rows_are_added_to_those_of_earlier_runs(tmp_path: Path) -> None:
    for ours in (1.0, 2.0):
        path = append([row(ours, 1.0, ">= 0.98")], "train", tmp_path / "build")

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "train.jsonl"
    assert [list(line) for line in lines] == [FIELDS, FIELDS]
    assert [line["ratio"] for line in lines] == [1.0, 2.0]
    assert lines[0]["ok"] is True
    assert lines[0]["commit"] == MACHINE.commit


def test_an_absent_peer_is_null_in_json(tmp_path: Path) -> None:
    path = append([row(1.0, None)], "train", tmp_path)

    assert json.loads(path.read_text())["ratio"] is None


def test_the_machine_is_told_by_its_processor_and_the_checkout_by_its_commit() -> None:
    here = Machine.here()

    assert "torch " in here.hardware
    assert socket.gethostname() not in here.hardware
    assert len(here.commit.removesuffix("-dirty")) >= 12
