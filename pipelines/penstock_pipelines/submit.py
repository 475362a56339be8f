"""Send a compiled pipeline to Vertex AI, or to whatever the environment points at, with the stock SDK."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_pipelines.errors import InputError, ServiceError
from penstock_pipelines.settings import Settings

RUN_LABEL = "penstock-run"
"""Label of the PipelineJob. GCPC hands a run's labels on to the jobs that it creates, which is how they are found."""
_RUN_ID = re.compile(r"[a-z][-a-z0-9]{0,62}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One run to be created."""

    compiled: Path
    run_id: str
    """PipelineJob id; a second submit of the same id is refused by the service."""
    parameters: Mapping[str, Any]
    enable_caching: bool | None = None

    def __post_init__(self) -> None:
        if _RUN_ID.match(self.run_id) is None:
            raise InputError(
                f"run id {self.run_id!r} is not valid: lower-case letters, digits and hyphens, at most 63 characters, "
                "beginning with a letter."
            )


def pipeline_job(submission: Submission, settings: Settings) -> Any:
    """The SDK's PipelineJob, not yet sent. Imports the SDK: about 2.5 CPU seconds."""
    from google.cloud import aiplatform

    # The SDK's own progress lines repeat what the command shows. It gives each of its loggers a level at import.
    logging.getLogger("google.cloud.aiplatform.pipeline_jobs").setLevel(logging.WARNING)
    return aiplatform.PipelineJob(
        display_name=submission.run_id,
        template_path=str(submission.compiled),
        job_id=submission.run_id,
        pipeline_root=settings.pipeline_root,
        parameter_values=dict(submission.parameters),
        enable_caching=submission.enable_caching,
        labels={RUN_LABEL: submission.run_id},
        project=settings.project,
        location=settings.location,
    )


def submit(submission: Submission, settings: Settings) -> Any:
    """Create the PipelineJob and return the SDK's object. Raises InputError or ServiceError."""
    from google.api_core import exceptions

    job = pipeline_job(submission, settings)
    try:
        job.submit(service_account=settings.service_account or None)
    except (exceptions.InvalidArgument, exceptions.AlreadyExists, exceptions.MethodNotImplemented) as exc:
        raise InputError(exc.message) from exc
    except exceptions.GoogleAPICallError as exc:
        raise ServiceError(f"the service refused the run: {exc}") from exc
    return job
