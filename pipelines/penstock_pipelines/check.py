"""Findings about a file or a recipe, and what changed against another: for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_components.jobs.check import Report, check_text
from penstock_components.jobs.documents import MOST_CHARACTERS, DocumentError, parse
from penstock_components.jobs.findings import Finding
from penstock_components.jobs.rules.context import Context
from penstock_pipelines.errors import InputError

if TYPE_CHECKING:
    from penstock_components.jobs.review import Rate

_MOST_BYTES = 4 * MOST_CHARACTERS
"""A character of UTF-8 has at most 4; more is not even read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What is said of one target."""

    target: str
    report: Report
    changes: tuple[str, ...] | None = None
    """Against another one; None when there was none to compare with."""

    @property
    def exit_code(self) -> int:
        """1 when any finding is an error. Changes alone are no failure."""
        return int(self.report.has_errors)

    def to_json(self) -> str:
        """The same for programs."""
        told = {
            "target": self.target,
            "kind": self.report.kind,
            "findings": [asdict(finding) for finding in self.report.findings],
            "changes": None if self.changes is None else list(self.changes),
        }
        return json.dumps(told, indent=2)

    def told(self) -> str:
        """For people, a paragraph for each finding."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        findings = self.report.findings
        for finding in sorted(findings, key=lambda each: each.severity):
            yield f"{finding.severity}  {finding.path or '(the whole)'}  [{finding.rule}]"
            yield f"       {finding.reason} {finding.fix}".rstrip()
        yield f"{self.target}: {self.report.kind or 'not a job'}, {_count(findings, 'error')}, {_count(findings, 'warning')}"
        if self.changes is not None:
            yield "no differences" if not self.changes else f"{len(self.changes)} differences:"
            yield from (f"  {line}" for line in self.changes)


def check_target(
    target: str, text: str, *, location: str = "", against: Path | None = None, rate: Rate | None = None
) -> Checked:
    """Judge a document's text, and compare it. Raises InputError when `against` is not a document."""
    report = check_text(text, name=target, context=Context(location=location))
    if against is None:
        return Checked(target=target, report=report)
    from penstock_components.jobs.review import review

    old = _parsed(read_document(against), against.name)
    new = _parsed(text, target)
    return Checked(target=target, report=report, changes=tuple(review(old, new, rate=rate)))


def refused(target: str, findings: Sequence[Finding]) -> Checked:
    """What is said of a recipe whose job spec could not be made."""
    return Checked(target=target, report=Report(kind="recipe", findings=tuple(findings)))


def read_document(path: Path) -> str:
    """The text of a file. Raises InputError when it cannot be one: no file, too large, or not text."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise InputError(
                f"{path} has {size / 2**20:,.0f} MiB; a job spec or a compiled pipeline has at most "
                f"{_MOST_BYTES / 2**20:.0f} MiB. Give the spec alone."
            )
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} cannot be read as text: {exc}.") from exc


def _parsed(text: str, name: str) -> Any:
    try:
        return parse(text, name=name)
    except DocumentError as exc:
        raise InputError(f"{name}: {exc}") from exc


def _count(findings: Sequence[Finding], severity: str) -> str:
    number = sum(finding.severity == severity for finding in findings)
    return f"{number} {severity}{'' if number == 1 else 's'}"
