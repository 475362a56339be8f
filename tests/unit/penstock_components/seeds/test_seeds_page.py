"""docs/seeds.md is complete, and everything that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "seeds.md"
SPECS = "tests/unit/penstock_components/seeds/specs"

BLOCKS = {"000": 26, "001": 31, "002": 30, "003": 0, "004": 6}
"""Fenced code blocks of each seed: 93. A formula that is fenced inside a quotation is a claim."""
TABLES = {"000": 3, "001": 2, "002": 2, "003": 0, "004": 0}
VERDICTS = {"right", "right with changes", "wrong", "not verifiable"}
ISSUES = {"First real run", "Checkpoints", "Data", "later"}

_SEED = re.compile(r"## Seed (\d{3}): ")
_PLACE = re.compile(r"(?P<section>.+), (?:(?P<kind>block|table) (?P<number>\d+)|claim)")
_FOLDERS = "components|docs|local_vertex|pipelines|tests|trainer_image"
_NAMED = re.compile(rf"`((?:{_FOLDERS})/[^`:]*|constraints\.txt)(?:::([^`]+))?`")
_MODULE = re.compile(r"`(penstock_(?:components|local|pipelines|trainer)(?:\.[a-z_]+)+)`")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a seed's table."""

    seed: str
    place: str
    verdict: str
    what_we_do: str
    shown_by: str

    @property
    def part(self) -> tuple[str, str, int] | None:
        """(seed, "block" or "table", number); None for a claim."""
        match = _PLACE.fullmatch(self.place)
        assert match is not None, f"{self.place!r} is not of the form 'SECTION, block N'"
        return (self.seed, match["kind"], int(match["number"])) if match["kind"] else None


def rows() -> list[Row]:
    found: list[Row] = []
    seed = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = _SEED.match(line)
            seed = heading[1] if heading else ""
        elif seed and line.startswith("| ") and not line.startswith(("| Where ", "| --- ")):
            place, _, verdict, what_we_do, shown_by = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(Row(seed, place, verdict, what_we_do, shown_by))
    return found


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("kind", "counts"), [("block", BLOCKS), ("table", TABLES)])
def test_every_block_and_table_of_every_seed_has_one_row(kind: str, counts: dict[str, int]) -> None:
    told = Counter(row.part for row in rows() if row.part and row.part[1] == kind)
    wanted = {(seed, kind, number) for seed, count in counts.items() for number in range(1, count + 1)}
    assert set(told) == wanted
    assert set(told.values()) == {1}
    assert sum(BLOCKS.values()) == 93


def test_every_row_has_a_verdict_and_says_what_shows_it_or_which_issue_it_is_open_in() -> None:
    for row in rows():
        assert row.verdict in VERDICTS, row
        assert row.what_we_do, row
        if row.shown_by == "none":
            assert row.verdict == "not verifiable", f"{row.place}: nothing shows it"
        else:
            assert _NAMED.search(row.shown_by) or row.shown_by.startswith("open: "), row


def test_open_parts_name_an_issue() -> None:
    named = re.findall(r"open: (First real run|\w+)", PAGE.read_text())
    assert set(named) == ISSUES


def test_every_file_and_test_that_the_page_names_exists() -> None:
    named = _NAMED.findall(PAGE.read_text())
    assert len(named) > 150
    for name, function in named:
        path = ROOT / name
        assert path.exists(), f"docs/seeds.md names {name}, which does not exist"
        if function:
            assert function in functions_of(path), (
                f"docs/seeds.md names {function}, which {name} does not have"
            )


def test_every_module_that_the_page_names_exists() -> None:
    packages = {path.name: path for path in ROOT.glob("*/penstock_*") if path.is_dir()}
    for name in _MODULE.findall(PAGE.read_text()):
        package, *rest = name.split(".")
        path = packages[package].joinpath(*rest)
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_every_job_spec_of_the_seeds_stands_in_the_row_of_its_block() -> None:
    specs = {
        path.name for path in (ROOT / SPECS).iterdir() if not path.name.endswith(".expected.yaml")
    }  # fmt: skip
    for row in rows():
        for name in re.findall(rf"`{SPECS}/([^`]+)`", row.shown_by):
            if row.part and row.part[1:] == ("block", int(name.split("-")[1])) and name[:3] == row.seed:
                specs.discard(name)
    assert not specs, "no row has them"
