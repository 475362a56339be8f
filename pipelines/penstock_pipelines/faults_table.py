"""The table that ends a disturbed run: a row for each fault, and what the run came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock_pipelines.fault_evidence import Row

_LEAST_WIDTH = 132
"""A log file has no width; what is narrower would be cut into syllables."""


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Rows in the order in which the faults struck, and below them what noticed each."""
    table = Table()
    for name in ("", "fault", "at step", "started again"):
        table.add_column(name, no_wrap=name == "fault")
    for name in ("first new step after", "steps lost", "samples repeated or skipped"):
        table.add_column(name, justify="right")
    for name in ("losses (of lines)", "verdict"):
        table.add_column(name)
    for number, row in enumerate(rows, start=1):
        struck = "" if row.struck_at_step is None else str(row.struck_at_step)
        seconds = "" if row.seconds_to_new_step is None else f"{row.seconds_to_new_step:.1f} s"
        cells = [str(number), row.fault, struck, row.restarted_in, seconds]
        cells += [str(row.steps_lost), str(row.samples_off), row.losses, row.verdict]
        table.add_row(*map(escape, cells), style="" if row.ok else "red")
    width = console.width
    console.width = max(width, _LEAST_WIDTH)
    console.print(table)
    console.width = width
    for number, row in enumerate(rows, start=1):
        for what, told in (("done", row.done), ("detected by", row.detected_by)):
            console.print(f"{number}  {what}: {told}", highlight=False, markup=False, soft_wrap=True)


def to_json(rows: Sequence[Row], **about: Any) -> str:
    """The same for programs; `about` are facts of the whole run."""
    return json.dumps({**about, "faults": [row.to_json() for row in rows]}, indent=2)
