"""The exit task."""

import json

import pytest

from penstock_components.launchers import record_status

JOB = "projects/1/locations/l/pipelineJobs/run-1"


def record(bed, **status):
    parameters = {"pipeline_root": bed.uri("root"), "run_name": "run-1", **status}
    assert bed.run(record_status.main, parameters) == 0
    return json.loads((bed.root / "root" / "run-1" / "status.json").read_text())


def test_a_failed_run_is_recorded_with_its_error(bed):
    status = {
        "state": "FAILED",
        "error": {"code": 9, "message": "train failed"},
        "pipelineJobResourceName": JOB,
        "pipelineTaskName": "exit-handler-1",
    }
    told = record(bed, status=status)
    assert told.pop("recorded_at").endswith("+00:00")
    assert told == {
        "state": "FAILED",
        "error_code": 9,
        "error_message": "train failed",
        "pipeline_job": JOB,
        "pipeline_task": "exit-handler-1",
    }


def test_the_snake_case_spelling_is_read_too(bed):
    assert (
        record(bed, status={"state": "SUCCEEDED", "pipeline_job_resource_name": JOB})["pipeline_job"] == JOB
    )


@pytest.mark.parametrize(
    "given", [{}, {"status": None}, {"status": {}}, {"status": {"error": None}}, {"status": ""}]
)
def test_empty_fields_never_fail(bed, given):
    told = record(bed, **given)
    assert told.pop("recorded_at")
    assert set(told.values()) == {"", 0}
