"""Documents that people write: what they are, and every fault in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_components.jobs.check import check_document, check_text, kind_of_document
from penstock_components.jobs.documents import MOST_CHARACTERS

GOLDEN = Path(__file__).parents[3] / "golden"


def spec(**changes: Any) -> dict[str, Any]:
    """Two nodes with one L4 each, in camelCase."""
    machine = {"machineType": "g2-standard-12", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}
    pool = {
        "machineSpec": machine,
        "replicaCount": 1,
        "containerSpec": {"imageUri": "europe-docker.pkg.dev/p/r/i:1"},
    }
    return {
        "workerPoolSpecs": [pool, pool],
        "scheduling": {"restartJobOnWorkerRestart": True},
        "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"},
    } | changes


def told(document: object) -> list[tuple[str, str]]:
    return [(each.path, each.rule) for each in check_document(document).findings if each.severity == "error"]


def test_a_good_job_is_told_nothing_in_either_case_and_either_form() -> None:
    report = check_document(spec())
    assert (report.kind, report.findings) == ("CustomJobSpec", ())
    job = {"displayName": "train", "jobSpec": spec()}
    assert check_document(job).findings == ()
    assert check_text(json.dumps(job), name="job.json").findings == ()
    assert check_text(yaml.safe_dump(job)).kind == "CustomJob"


def test_all_faults_come_in_one_pass_in_the_case_of_the_document() -> None:
    broken = spec()
    broken["workerPoolSpecs"] = [
        {**broken["workerPoolSpecs"][0], "replicaCount": 1.5, "useSpot": True},
        {**broken["workerPoolSpecs"][1], "machineSpec": {"machineTyp": "g2-standard-12", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 3}},
    ]  # fmt: skip
    assert sorted(told({"displayName": "x", "jobSpec": broken})) == [
        ("jobSpec.workerPoolSpecs[0].replicaCount", "number-expected"),
        ("jobSpec.workerPoolSpecs[0].useSpot", "spot-per-pool"),
        ("jobSpec.workerPoolSpecs[1].machineSpec.acceleratorCount", "accelerator-count"),
        ("jobSpec.workerPoolSpecs[1].machineSpec.machineTyp", "unknown-field"),
    ]


@pytest.mark.parametrize("recipe", ["tiny-zero2", "tiny-fsdp"])
def test_our_own_pipelines_have_no_error(recipe: str) -> None:
    report = check_text((GOLDEN / f"{recipe}.yaml").read_text())
    assert report.kind == "pipeline"
    assert not report.has_errors, [each.told() for each in report.findings]


def pipeline(**pool: Any) -> Any:
    """tiny-fsdp as compiled, with its pools changed."""
    document = yaml.safe_load((GOLDEN / "tiny-fsdp.yaml").read_text())
    tasks = document["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    constant = tasks["custom-training-job"]["inputs"]["parameters"]["worker_pool_specs"]["runtimeValue"][
        "constant"
    ]
    constant[0].update(pool)
    return document


@pytest.mark.parametrize(
    ("pool", "field", "rule"),
    [
        ({"replica_count": "{{$.inputs.parameters['pipelinechannel--nodes']}}"}, "replica_count", "placeholder"),
        ({"replica_count": 2.0}, "replica_count", "primary-replicas"),
        ({"machine_spec": {"machine_type": "{{$.inputs.parameters['pipelinechannel--m']}}"}}, "machine_spec.machine_type", "placeholder"),
        ({"machineSpec": {}}, "machine_spec", "field-case"),
    ],
)  # fmt: skip
def test_a_pipelines_pools_are_judged_where_they_stand(pool: dict[str, Any], field: str, rule: str) -> None:
    place = "components[comp-exit-handler-1].dag.tasks[custom-training-job].worker_pool_specs[0]"
    assert (f"{place}.{field}", rule) in told(pipeline(**pool))


def test_what_is_no_job_is_said_to_be_none() -> None:
    for document in ({"kind": "Deployment"}, [1, 2], "text", None, 3):
        (finding,) = check_document(document).findings
        assert finding.rule == "unknown-document"
        assert kind_of_document(document) == ""


@pytest.mark.parametrize(
    ("text", "name", "rule"),
    [
        ("{", "job.json", "unreadable"),
        ("a: [1\nb: 2", "job.yaml", "unreadable"),
        ("a: 1\na: 2", "", "unreadable"),
        ('{"a": 1, "a": 2}', "job.json", "unreadable"),
        ("!!python/object/apply:os.system ['true']", "", "unreadable"),
        ("[" * 100_000, "deep.json", "unreadable"),
        ("x" * (MOST_CHARACTERS + 1), "", "too-large"),
        (
            "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)),
            "",
            "unfolds",
        ),
        ("a: &a [*a]", "", "unfolds"),
        ("\x00", "", "unreadable"),
    ],
)
def test_what_cannot_be_read_is_one_finding(text: str, name: str, rule: str) -> None:
    (finding,) = check_text(text, name=name).findings
    assert finding.rule == rule
    assert len(finding.reason) < 500
