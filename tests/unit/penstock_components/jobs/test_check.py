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
    assert (report.kind, report.num_jobs) == ("pipeline", 1)
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


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"kind": "Deployment"}, "at its top there is 'kind'"),
        ([1, 2], "it is a list"),
        ([], "it is empty"),
        ({}, "it is empty"),
        (None, "it is empty"),
        ("text", "it is the text 'text'"),
        (3, "it is the number 3"),
        ({3: 4}, "at its top there is no name"),
        pytest.param(16**9999, "it is a number of 39997 bits", id="huge"),
        ({"deploymentSpecs": {}}, "at its top there is 'deploymentSpecs'"),
    ],
)
def test_what_is_no_job_is_said_to_be_none(document: object, says: str) -> None:
    report = check_document(document)
    (finding,) = report.findings
    assert (finding.rule, report.num_jobs) == ("unknown-document", 0)
    assert says in finding.reason
    assert ("Did you mean deploymentSpec" in finding.fix) == ("deploymentSpecs" in says)
    assert kind_of_document(document) == ""


@pytest.mark.parametrize("name", ["workerPoolSpec", "WorkerPoolSpecs", "workerpoolspecs", "workerPoolsSpecs"])
def test_a_misspelt_field_at_the_top_is_one_finding_and_the_job_is_judged(name: str) -> None:
    document = spec()
    pools = document.pop("workerPoolSpecs")
    report = check_document({name: pools} | document)
    (finding,) = report.findings
    assert (report.kind, finding.rule, finding.fix) == (
        "CustomJobSpec",
        "unknown-field",
        "Write 'workerPoolSpecs'.",
    )
    broken = [{**pools[0], "replicaCount": 2}, pools[1]]
    assert ("workerPoolSpecs[0].replicaCount", "primary-replicas") in told({name: broken} | document)


def test_a_job_inside_the_request_for_it_is_judged_there() -> None:
    job = {"displayName": "train", "jobSpec": spec()}
    assert told({"parent": "projects/p", "customJob": job}) == [("customJob", "document-form")]
    wrong = {"displayName": "train", "jobSpec": spec(timeout="60s")}
    assert told({"customJob": wrong}) == [
        ("customJob", "document-form"),
        ("customJob.jobSpec.timeout", "field-level"),
    ]
    inside = check_document({"custom_job": {"workerPoolSpecs": spec()["workerPoolSpecs"]}})
    assert inside.kind == "CustomJobSpec"


def test_a_bare_list_of_pools_is_told_so_and_the_rest_of_the_job_is_left_open() -> None:
    first, second = spec()["workerPoolSpecs"]
    assert [(each.path, each.rule) for each in check_document([first, second]).findings] == [
        ("", "document-form")
    ]
    assert told([{**first, "replicaCount": 2}, second]) == [
        ("", "document-form"),
        ("workerPoolSpecs[0].replicaCount", "primary-replicas"),
    ]


def test_a_value_that_cannot_be_read_is_not_judged_as_if_it_were_the_default() -> None:
    scheduling = {"strategy": [], "maxWaitDuration": "3600s", "restartJobOnWorkerRestart": True}
    assert told(spec(scheduling=scheduling)) == [("scheduling.strategy", "enum")]
    assert told(spec(scheduling={"restartJobOnWorkerRestart": "maybe"})) == [
        ("scheduling.restartJobOnWorkerRestart", "bool-expected")
    ]


def test_fields_are_spoken_of_as_the_document_writes_them() -> None:
    pool = {**spec()["workerPoolSpecs"][0], "replicaCount": 2}
    (finding,) = check_document(spec(workerPoolSpecs=[pool])).findings
    assert finding.fix.startswith("Set replicaCount to 1")
    assert "machineSpec" in finding.fix
    pool = {**spec()["workerPoolSpecs"][0], "replica_count": 1}
    del pool["replicaCount"]
    (finding,) = check_document(spec(workerPoolSpecs=[pool])).findings
    assert "'replica_count'" in finding.reason, "what was given is quoted as it stands"


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
