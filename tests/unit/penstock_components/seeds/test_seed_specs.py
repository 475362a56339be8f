"""The job specs of the seeds, re-expressed as data of our own, through `check`.

`specs/<seed>-<block>-<topic>.yaml` or `.json` has the structure and the faults of that block of the seed. Beside it,
`.expected.yaml` lists its errors (`path`, `rule` and words that the message `says`), the rules of its warnings, and,
where there is anything to mend, the job `mended` as the messages say. A spec without errors is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJob, CustomJobSpec, HyperparameterTuningJob
from google.protobuf.json_format import ParseError

from penstock_components.jobs.check import Report, check_document, check_text
from penstock_components.jobs.findings import Finding

DIRECTORY = Path(__file__).parent / "specs"
SPECS = sorted(path for path in DIRECTORY.iterdir() if not path.stem.endswith(".expected"))
PROTOS = {
    "CustomJob": CustomJob,
    "CustomJobSpec": CustomJobSpec,
    "HyperparameterTuningJob": HyperparameterTuningJob,
}
FORM = {"unknown-field", "field-level", "image-field", "spot-per-pool", "persistent-disk", "field-case"}
"""Rules about fields that do not exist where they stand: the faults that Google's clients see too."""

each_spec = pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)


def expected_of(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(path.with_name(f"{path.stem}.expected.yaml").read_text())
    return told


def report_on(path: Path) -> Report:
    return check_text(path.read_text(), name=path.name)


def of_severity(report: Report, severity: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == severity]


def test_every_spec_has_what_is_expected_of_it_and_nothing_is_left_over() -> None:
    assert {f"{path.stem}.expected" for path in SPECS} == {
        path.stem for path in DIRECTORY.glob("*.expected.yaml")
    }


@each_spec
def test_a_job_spec_of_the_seeds_is_accepted_or_refused_with_the_real_way(path: Path) -> None:
    report, expected = report_on(path), expected_of(path)
    told = {(finding.path, finding.rule): finding.told() for finding in of_severity(report, "error")}
    wanted = {(error["path"], error["rule"]): error["says"] for error in expected.get("errors", [])}
    assert set(told) == set(wanted)
    assert len(told) == len(of_severity(report, "error")), "a fault is told once"
    for place, words in wanted.items():
        assert words in told[place]
    assert {finding.rule for finding in of_severity(report, "warning")} == set(expected.get("warnings", []))


@each_spec
def test_what_is_mended_as_told_is_accepted(path: Path) -> None:
    expected = expected_of(path)
    assert ("mended" in expected) == bool({"errors", "warnings"} & set(expected))
    if "mended" in expected:
        report = check_document(expected["mended"])
        assert report.kind == report_on(path).kind
        assert [finding.told() for finding in report.findings] == []
        PROTOS[report.kind].from_json(json.dumps(expected["mended"]))


@each_spec
def test_the_real_proto_refuses_exactly_the_specs_with_a_fault_of_form(path: Path) -> None:
    report = report_on(path)
    document = json.dumps(yaml.safe_load(path.read_text()))
    if any(finding.rule in FORM for finding in report.findings):
        with pytest.raises(ParseError):
            PROTOS[report.kind].from_json(document)
    else:
        PROTOS[report.kind].from_json(document)
