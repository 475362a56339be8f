"""schedule create: retraining by the clock."""

from __future__ import annotations

from pathlib import Path

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.settings import load_settings
from penstock_pipelines.verbs.options import parameter_option, state_option
from penstock_pipelines.verbs.processes import reenter_with
from penstock_pipelines.verbs.runs import defaults


@click.group()
def schedule() -> None:
    """Schedules that retrain."""


@schedule.command("create")
@click.argument("compiled", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cron", required=True, help='Such as "TZ=Europe/Berlin 0 3 * * 1".')
@click.option("--name", help="Display name; default: the pipeline's.")
@click.option("--max-runs", type=click.IntRange(min=1), help="Runs after which the schedule is complete.")
@parameter_option
@state_option
@click.pass_obj
def create_schedule(
    settings_file: Path | None,
    compiled: Path,
    cron: str,
    name: str | None,
    max_runs: int | None,
    parameters: tuple[str, ...],
    state: Path,
) -> None:
    """Make a Vertex schedule that runs COMPILED whenever --cron says."""
    reenter_with(state, settings_file)
    from google.api_core import exceptions

    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.submit import Submission, pipeline_job

    settings = load_settings(settings_file)
    declared = PipelineParameters(compiled)
    values = declared.values(parameters, defaults(settings, declared))
    job = pipeline_job(
        Submission(compiled=compiled, run_id=declared.pipeline_name, parameters=values), settings
    )
    try:
        made = job.create_schedule(
            cron=cron,
            display_name=name or declared.pipeline_name,
            max_run_count=max_runs,
            service_account=settings.service_account or None,
        )
    except exceptions.InvalidArgument as exc:
        raise InputError(exc.message) from exc
    click.echo(f"schedule {made.resource_name}, next run {made.to_dict().get('nextRunTime')}")
