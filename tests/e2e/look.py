"""What became of a run, read through the stock SDK, as JSON: `python look.py RUN_ID`."""

import json
import sys
from typing import Any

from google.cloud import aiplatform, storage

from penstock_pipelines.follow import Follower
from penstock_pipelines.logs import LogReader
from penstock_trainer.contract.events import StepEvent, parse_event


def main(run_id: str) -> dict[str, Any]:
    aiplatform.init(project="demo", location="us-central1")
    job = aiplatform.PipelineJob.get(run_id)
    follower = Follower(job, project="demo")
    follower.refresh()
    root = job.resource_name.replace("pipelineJobs/", "")
    custom_jobs = aiplatform.CustomJob.list(filter=f'labels.penstock-run="{run_id}"')
    models = {
        version.version_id: sorted(version.version_aliases)
        for model in aiplatform.Model.list()
        for version in aiplatform.models.ModelRegistry(model).list_versions()
        if model.display_name
        == job.to_dict()["pipelineSpec"]["pipelineInfo"]["name"].removeprefix("pretrain-")
    }
    train = f"pipeline-root/{run_id}/"
    return {
        "root": root,
        "state": job.state.name,
        "tasks": {name: task.state for name, task in follower.view.tasks.items()},
        "evaluate": follower.outputs("evaluate"),
        "gate": follower.outputs("gate"),
        "registered": follower.outputs("register-model"),
        "pools": [pools(custom_job) for custom_job in custom_jobs],
        "losses": losses(custom_jobs),
        "lines": [line.text for job in custom_jobs for line in LogReader("demo").lines(job.name)],
        "models": models,
        "objects": [blob.name for blob in storage.Client().list_blobs("demo-penstock", prefix=train)],
    }


def pools(custom_job: aiplatform.CustomJob) -> list[dict[str, Any]]:
    return [
        {
            "image": pool.container_spec.image_uri,
            "replicas": pool.replica_count,
            "machine": pool.machine_spec.machine_type,
        }
        for pool in custom_job.gca_resource.job_spec.worker_pool_specs
    ]


def losses(custom_jobs: list[aiplatform.CustomJob]) -> dict[int, list[str]]:
    """Exact losses by step, in the order in which they were logged: twice where a step was taken again."""
    found: dict[int, list[str]] = {}
    for custom_job in custom_jobs:
        for line in LogReader("demo").lines(custom_job.name):
            event = parse_event(line.payload)
            if isinstance(event, StepEvent):
                found.setdefault(event.step, []).append(event.loss.hex())
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
