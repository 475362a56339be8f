"""Exit task: leave the run's end state where people and programs find it without the Vertex AI API.

python -m penstock_components.launchers.record_status --executor-input '{{$}}'
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_components.launchers import executor
from penstock_trainer.storage import join, storage_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task. `status` has kfp's PipelineTaskFinalStatus, as far as the backend fills it."""

    status: Any = None
    pipeline_root: str
    run_name: str


def record_status(task: executor.ExecutorInput) -> None:
    """Write status.json beside the run's outputs. A field that the backend leaves out is empty, never an error."""
    inputs = task.parameters_as(Inputs)
    record = status_record(inputs.status)
    log.info(
        "run %s %s %s",
        inputs.run_name,
        record["state"] or "ended in an unknown state",
        record["error_message"],
    )
    uri = join(inputs.pipeline_root, inputs.run_name, "status.json")
    storage_for(uri).write(uri, json.dumps(record, indent=1).encode(), content_type="application/json")
    executor.write_outputs(task)


def status_record(status: Any) -> dict[str, Any]:
    """What status.json says. Backends spell the fields in camelCase or in snake_case."""
    status = status if isinstance(status, Mapping) else {}
    error = status.get("error") or {}
    return {
        "state": status.get("state") or "",
        "error_code": error.get("code") or 0,
        "error_message": error.get("message") or "",
        "pipeline_job": status.get("pipelineJobResourceName")
        or status.get("pipeline_job_resource_name")
        or "",
        "pipeline_task": status.get("pipelineTaskName") or status.get("pipeline_task_name") or "",
        "recorded_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the task."""
    return executor.run(record_status, argv)


if __name__ == "__main__":
    sys.exit(main())
