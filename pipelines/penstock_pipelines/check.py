"""Findings about a file or a recipe, and what changed against another: for people and as JSON."""

from __future__ import annotations

import codecs
import json
import sys
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
_STANDARD_INPUT = Path("-")


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
            "num_jobs": self.report.num_jobs,
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
        yield f"{self.target}: {self._kind()}, {_count(findings, 'error')}, {_count(findings, 'warning')}"
        if self.changes is not None:
            yield "no differences" if not self.changes else f"{len(self.changes)} differences:"
            yield from (f"  {line}" for line in self.changes)

    def _kind(self) -> str:
        report = self.report
        if report.kind != "pipeline":
            return report.kind or "not a job"
        jobs = f"{report.num_jobs or 'no'} training job{'s' if report.num_jobs > 1 else ''}"
        return f"pipeline with {jobs}"


def check_target(
    target: str, text: str, *, location: str = "", against: Path | None = None, rate: Rate | None = None
) -> Checked:
    """Judge a document's text, and compare it. Raises InputError when `against` is no document of its kind.

    What is no job itself is not compared.
    """
    report = check_text(text, name=target, context=Context(location=location))
    if against is None or not report.kind:
        return Checked(target=target, report=report)
    from penstock_components.jobs.review import ReviewError, review

    old = _parsed(read_document(against), against.name)
    new = _parsed(text, target)
    try:
        return Checked(target=target, report=report, changes=tuple(review(old, new, rate=rate)))
    except ReviewError as exc:
        raise InputError(str(exc)) from exc


def refused(target: str, findings: Sequence[Finding]) -> Checked:
    """What is said of a recipe whose job spec could not be made."""
    return Checked(target=target, report=Report(kind="recipe", findings=tuple(findings)))


def read_document(path: Path) -> str:
    """The text of a file, or of the standard input for `-`, in UTF-8, or in UTF-16 where it begins with its mark.

    Raises InputError when it cannot be a document: no file, too large, or not text.
    """
    is_file = path != _STANDARD_INPUT
    name = str(path) if is_file else "the standard input"
    try:
        content = _first_bytes(path) if is_file else sys.stdin.buffer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            size = path.stat().st_size if is_file else _MOST_BYTES
            raise InputError(
                f"{name} has {'' if is_file else 'more than '}{size / 2**20:,.0f} MiB; a job spec or a compiled pipeline has "
                f"at most {_MOST_BYTES / 2**20:.0f} MiB. "
                "Give the spec alone."
            )
        return content.decode(_encoding(content))
    except OSError as exc:
        raise InputError(f"{name} cannot be read: {exc}.") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{name} cannot be read as text: {exc}. Save it in UTF-8.") from exc


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES + 1)


def _encoding(content: bytes) -> str:
    """PowerShell writes UTF-16 when output is redirected, and several editors on Windows a mark before UTF-8."""
    is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if is_utf_16 else "utf-8-sig"


def _parsed(text: str, name: str) -> Any:
    try:
        return parse(text, name=name)
    except DocumentError as exc:
        raise InputError(f"{name}: {exc}") from exc


def _count(findings: Sequence[Finding], severity: str) -> str:
    number = sum(finding.severity == severity for finding in findings)
    return f"{number} {severity}{'' if number == 1 else 's'}"
