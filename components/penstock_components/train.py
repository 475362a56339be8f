"""Component `train`: GCPC's CustomTrainingJobOp, filled in from a typed job spec and the trainer's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from penstock_components.jobs.pools import Container, Machine
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.spec import Scheduling, TrainingJob
from penstock_trainer.contract.config import JobConfig, compile_time_json

TRAIN_DIRECTORY = f"{dsl.PIPELINE_ROOT_PLACEHOLDER}/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}/train"
"""Where a run's checkpoints and export lie: the same over replica, job and task retries, another for each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The machines that a recipe trains on."""

    machine: Machine
    num_nodes: int
    reduction_server: ReductionServer | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)

    def job(self, *, image: str, args: tuple[str, ...], location: str) -> TrainingJob:
        """The job that runs the trainer on these machines."""
        return TrainingJob(
            machine=self.machine,
            num_nodes=self.num_nodes,
            container=Container(image_uri=image, command=("python", "-m", "penstock_trainer"), args=args),
            location=location,
            reduction_server=self.reduction_server,
            scheduling=self.scheduling,
        )


def train(
    config: JobConfig,
    *,
    runtime: Mapping[str, Any],
    resources: Resources,
    image: str,
    location: str,
    display_name: str,
    service_account: Any = "",
) -> dsl.PipelineTask:
    """The task that trains, for use inside a pipeline function.

    `runtime` maps dotted fields of the config to pipeline parameters or task outputs: they become flags behind
    `--config`, which holds everything else as JSON. Raises ContractError for a field that does not exist.
    """
    compile_time = compile_time_json(config, runtime=list(runtime))
    args = (f"--config={compile_time}", *(f"--{name}={value}" for name, value in runtime.items()))
    job = resources.job(image=image, args=args, location=location)
    return CustomTrainingJobOp(
        display_name=display_name,
        base_output_directory=TRAIN_DIRECTORY,
        service_account=service_account,
        **job.to_gcpc(),
    ).set_caching_options(False)
