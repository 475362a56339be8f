"""What a benchmark says: ratios of medians with an interval, as a table and as JSON lines that can be kept.

A ratio is always ours / peer, so whether more or less is better is in the sign of the row's target.
"""

from __future__ import annotations

import json
import operator
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import bootstrap

Samples = npt.NDArray[np.float64]

CONFIDENCE = 0.95
_RESAMPLES = 9_999
_SEED = 0
_SIGNS = {">=": operator.ge, "<=": operator.le}
_REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = _REPOSITORY / "build" / "bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was measured, and on what."""

    hardware: str
    commit: str

    @classmethod
    def here(cls) -> Machine:
        """This machine and this checkout; a commit with changes that are not committed is marked `-dirty`."""
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=_REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        return cls(hardware=_hardware(), commit=described.stdout.strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison. The fields are those of a line in build/bench/<suite>.jsonl."""

    metric: str
    ours: float
    """Median."""
    peer: float | None
    """Median; None: the peer did not run."""
    peer_name: str
    unit: str
    """Of `ours` and `peer`."""
    ratio: float | None
    """ours / peer."""
    low: float | None
    """Of the ratio's interval."""
    high: float | None
    target: str
    """`>= x` or `<= x` for the whole interval; empty: the row is for information."""
    ok: bool
    """Whether the peer ran and the target, if there is one, is met."""
    hardware: str
    commit: str


def compare(
    metric: str,
    ours: Samples,
    peer: Samples | None,
    *,
    peer_name: str,
    unit: str,
    machine: Machine,
    target: str = "",
) -> Row:
    """A row from samples that were taken in pairs: sample i of both in the same round. `peer` None: it did not run.

    A target is met when the worse end of the interval meets it. Raises ValueError for a target without a sign, and for
    samples that are no pairs.
    """
    interval = None if peer is None else ratio_interval(ours, peer)
    return Row(
        metric=metric,
        ours=float(np.median(ours)),
        peer=None if peer is None else float(np.median(peer)),
        peer_name=peer_name,
        unit=unit,
        ratio=None if peer is None else float(np.median(ours) / np.median(peer)),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        target=target,
        ok=meets(target, interval),
        hardware=machine.hardware,
        commit=machine.commit,
    )


def meets(target: str, interval: tuple[float, float] | None) -> bool:
    """Whether the whole interval is on the target's side. Without an interval nothing is met, without a target all is.

    Raises ValueError for a target of another form than `>= 0.98` or `<= 1.3`.
    """
    sign, _, value = target.partition(" ")
    if target and sign not in _SIGNS:
        raise ValueError(f"target {target!r} has no sign: allowed are '>= x' and '<= x'.")
    if interval is None:
        return False
    return not target or all(_SIGNS[sign](end, float(value)) for end in interval)


def ratio_interval(ours: Samples, peer: Samples) -> tuple[float, float]:
    """95 % interval of median(ours) / median(peer): percentile bootstrap over pairs (Efron and Tibshirani, 1993)."""
    if len(ours) != len(peer) or len(ours) < 2:
        raise ValueError(
            f"samples must be pairs, at least 2 of them: ours has {len(ours)} and the peer {len(peer)}."
        )
    return _interval((ours, peer), lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis))


def median_interval(samples: Samples) -> tuple[float, float]:
    """95 % interval of the median."""
    return _interval((samples,), np.median)


def _interval(data: tuple[Samples, ...], statistic: Any) -> tuple[float, float]:
    found = bootstrap(
        data,
        statistic,
        paired=len(data) > 1,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        rng=_SEED,
    ).confidence_interval
    return float(found.low), float(found.high)


def table(rows: Sequence[Row]) -> str:
    """For people to read; `ok` stands at rows that have a target."""
    cells: list[tuple[str, ...]] = [("metric", "ours", "peer", "", "unit", "ratio", "95 %", "target", "")]
    cells += [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    interval = "" if row.low is None or row.high is None else f"[{row.low:.4f}, {row.high:.4f}]"
    return (
        row.metric,
        f"{row.ours:,.4g}",
        "did not run" if row.peer is None else f"{row.peer:,.4g}",
        row.peer_name,
        row.unit,
        "" if row.ratio is None else f"{row.ratio:.4f}",
        interval,
        row.target,
        "NOT OK" if not row.ok else "ok" if row.target else "",
    )


def append(rows: Iterable[Row], suite: str, directory: Path = RESULTS) -> Path:
    """Add the rows to <directory>/<suite>.jsonl, and return that path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{suite}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return path


def exit_code(rows: Iterable[Row]) -> int:
    """1 when a row that has a target is not ok, else 0."""
    return int(any(row.target and not row.ok for row in rows))


def _hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    parts = [f"{len(models)} x {models[0]}" if models else "unknown processor"]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join([*parts, f"torch {torch.__version__}"])
