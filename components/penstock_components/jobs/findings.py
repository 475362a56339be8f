"""What is wrong with a job spec: findings, each with its place, and the error that carries them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Case = Literal["snake", "camel"]

_MOST_QUOTED = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault of a spec, told so that a stranger can mend it."""

    path: str
    """Of the field, in the names of the proto: `worker_pool_specs[0].machine_spec.accelerator_count`."""
    rule: str
    """Which rule it breaks, stable and hyphenated: `accelerator-count`."""
    reason: str
    """What is wrong, with what was given."""
    fix: str
    """What to write instead."""
    severity: Severity = "error"
    """An error is refused by the service or does not do what it says; a warning costs time or money."""

    def told(self) -> str:
        """For people: `error worker_pool_specs[0].replica_count: pool 0 has 2 replicas. Write ...`."""
        return f"{self.severity} {self.path or '(the whole)'}: {self.reason} {self.fix}"


class JobSpecError(ValueError):
    """A job spec that Vertex AI would refuse, or that would not do what it says.

    `findings` are its errors, all of them.
    """

    def __init__(self, findings: Sequence[Finding] | str) -> None:
        """One text stands for an error that belongs to no field."""
        if isinstance(findings, str):
            findings = [Finding(path="", rule="usage", reason=findings, fix="")]
        self.findings = tuple(findings)
        super().__init__("\n".join(_line(finding) for finding in self.findings))


def require(findings: Iterable[Finding]) -> list[Finding]:
    """The warnings among these findings. Raises JobSpecError with every error when there is one."""
    found = list(findings)
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        raise JobSpecError(errors)
    return found


def in_case(path: str, case: Case) -> str:
    """A path with the field names of snake_case or camelCase; what stands in brackets is left alone."""
    if case == "snake":
        return path
    return re.sub(r"(\[[^\]]*\])|_([a-z0-9])", lambda match: match[1] or match[2].upper(), path)


def quoted(text: str) -> str:
    """A given text for a message; a long one cut off."""
    return repr(text) if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]!r}..."


def _line(finding: Finding) -> str:
    text = f"{finding.reason} {finding.fix}".strip()
    return f"{finding.path}: {text}" if finding.path else text
