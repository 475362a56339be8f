"""The facts of one run that tasks can see."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """Who and where a run is."""

    resource_name: str
    """`projects/.../locations/.../pipelineJobs/JOB_ID`."""
    pipeline_job_uuid: str
    """What `{{$.pipeline_job_uuid}}` says; GCPC puts it where a pipeline job's id belongs."""
    project_id: str
    project_number: str
    location: str
    pipeline_root: str
    """A gs:// URI without trailing slash."""
    create_time: datetime
    schedule_time: datetime | None = None
    """When the schedule wanted the run to start; None for a run that somebody started."""
    read_object: Callable[[str], bytes]
    """The content of a gs:// URI, for `.value` of an artifact. Raises OSError."""

    @property
    def job_id(self) -> str:
        """The last part of the resource name, which is what `{{$.pipeline_job_name}}` says."""
        return self.resource_name.rpartition("/")[2]

    def placeholders(self) -> Mapping[str, str]:
        """The placeholders that say the same in every task of the run."""
        values = {
            "pipeline_job_name": self.job_id,
            "pipeline_job_resource_name": self.resource_name,
            "pipeline_job_uuid": self.pipeline_job_uuid,
            "pipeline_root": self.pipeline_root,
            "pipeline_google_cloud_project_id": self.project_id,
            "pipeline_google_cloud_location": self.location,
            "pipeline_persistent_resource_id": "",
            "pipeline_job_create_time_utc": _utc(self.create_time),
        }
        if self.schedule_time is not None:
            values["pipeline_job_schedule_time_utc"] = _utc(self.schedule_time)
        return values

    def output_uri(self, task_name: str, task_id: int, output_name: str) -> str:
        """Where a task's output artifact goes, in Vertex AI's form."""
        task = f"{task_name}_{task_id}"
        return f"{self.pipeline_root}/{self.project_number}/{self.job_id}/{task}/{output_name}"

    def artifact_name(self, artifact_id: str) -> str:
        """The resource name of an artifact in this project's metadata store."""
        return f"projects/{self.project_number}/locations/{self.location}/metadataStores/default/artifacts/{artifact_id}"


def _utc(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
