"""run, submit, status, logs: pipeline runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.local import reset_state, server_on
from penstock_pipelines.settings import Settings, load_settings
from penstock_pipelines.verbs.authoring import compile_to
from penstock_pipelines.verbs.options import allow_tags_option, images_option, parameter_option, state_option
from penstock_pipelines.verbs.processes import (
    EXIT_INTERRUPTED,
    child,
    interrupt_on_signals,
    reenter_with,
    this_command,
)
from penstock_pipelines.verbs.rehearsals import check_faults, require_no_json

if TYPE_CHECKING:
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.recipe import Recipe


@click.command()
@click.argument("recipe", default="tiny-zero2")
@state_option
@click.option("--reset", is_flag=True, help="Delete the state directory first.")
@click.option(
    "--prepare", type=click.Path(exists=True, path_type=Path), help="Python script to run before the submit."
)
@images_option
@click.option("--run-id", help="PipelineJob id; default: recipe and time.")
@click.option(
    "--faults",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML of what is to go wrong: runs the recipe undisturbed and then with these faults, and compares.",
)
@click.option("--json", "as_json", is_flag=True, help="With --faults: the table for programs.")
@parameter_option
@allow_tags_option
@click.pass_obj
def run(
    settings_file: Path | None,
    recipe: str,
    state: Path,
    reset: bool,
    prepare: Path | None,
    images: Path | None,
    run_id: str | None,
    faults: Path | None,
    as_json: bool,
    parameters: tuple[str, ...],
    allow_tags: bool,
) -> None:
    """Compile RECIPE and run that file on the stand-in, to the end."""
    interrupt_on_signals()
    require_no_json(as_json, faults)
    settings = load_settings(settings_file)
    if faults:
        check_faults(faults)
    path, digest, found = compile_to(settings, recipe, None, allow_tags)
    _check_parameters(settings, path, parameters, found)
    click.echo(f"compiled {path} (sha256 {digest})", err=as_json)
    if reset:
        reset_state(state)
    with server_on(state, settings, images=images) as server:
        told = f"stand-in: project {settings.project}, state {state}, port {server.front_port}"
        click.echo(told, err=as_json)
        environment = server.environment() | {"PENSTOCK_BUCKET": settings.bucket}
        code = child([str(prepare)], environment) if prepare else 0
        if code != 0:
            click.echo(f"error: the script {prepare} ended with code {code}; nothing was submitted", err=True)
        else:
            verb = ["submit", str(path), "--report-dir", str(state / "reports")]
            if faults:
                control = f"http://127.0.0.1:{server.front_port}/penstock"
                verb = ["rehearse", str(path), "--faults", str(faults), "--control", control]
                verb += ["--json"] if as_json else []
            arguments = [*this_command(settings_file), *verb]
            arguments += ["--run-id", run_id] if run_id else []
            code = child([*arguments, *(f"--param={text}" for text in parameters)], environment)
    sys.exit(code)


@click.command()
@click.argument("compiled", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--run-id", help="PipelineJob id; default: pipeline and time. The service refuses a second one."
)
@click.option("--detach", is_flag=True, help="Do not follow the run.")
@click.option("--cache/--no-cache", "caching", default=None, help="Override the tasks' own caching.")
@click.option(
    "--report-dir",
    type=click.Path(path_type=Path),
    default=Path("build/reports"),
    help="Where the HTML report goes.",
)
@parameter_option
@click.pass_obj
def submit(
    settings_file: Path | None,
    compiled: Path,
    run_id: str | None,
    detach: bool,
    caching: bool | None,
    report_dir: Path,
    parameters: tuple[str, ...],
) -> None:
    """Send COMPILED to Vertex AI, or to the stand-in of `penstock local env`, and follow the run."""
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.submit import Submission
    from penstock_pipelines.submit import submit as send

    settings = load_settings(settings_file)
    declared = PipelineParameters(compiled)
    values = declared.values(parameters, defaults(settings, declared))
    run_id = run_id or f"{declared.pipeline_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    submission = Submission(compiled=compiled, run_id=run_id, parameters=values, enable_caching=caching)
    job = send(submission, settings)
    click.echo(f"run {job.resource_name}\n{job._dashboard_uri()}")
    if not detach:
        _follow(job, settings, report_dir)


@click.command()
@click.argument("run_id", required=False)
@state_option
@click.pass_obj
def status(settings_file: Path | None, run_id: str | None, state: Path) -> None:
    """Runs and their states, or the tasks of RUN_ID. Asks the stand-in if one runs on --state, else Vertex AI."""
    reenter_with(state, settings_file)
    settings = load_settings(settings_file)
    from rich.console import Console

    from penstock_pipelines.follow import Follower
    from penstock_pipelines.summary import print_summary

    if run_id is None:
        for job in _sdk(settings).PipelineJob.list():
            click.echo(
                f"{job.name}  {job.state.name.removeprefix('PIPELINE_STATE_').lower()}  {job.create_time:%F %T}"
            )
        return
    follower = Follower(_run(settings, run_id), project=settings.project)
    follower.refresh()
    print_summary(Console(), follower, report_dir=state / "reports")


@click.command()
@click.argument("run_id")
@click.option("--task", default="custom-training-job", help="Name of the task; training by default.")
@click.option("--replica", help="Only this replica of training, such as workerpool1-0.")
@state_option
@click.pass_obj
def logs(settings_file: Path | None, run_id: str, task: str, replica: str | None, state: Path) -> None:
    """Lines of a task of RUN_ID, or of the training replicas."""
    reenter_with(state, settings_file)
    settings = load_settings(settings_file)
    from penstock_pipelines.follow import Follower
    from penstock_pipelines.logs import LogReader

    follower = Follower(_run(settings, run_id), project=settings.project)
    follower.refresh()
    if task not in follower.view.tasks:
        raise InputError(
            f"{run_id} has no task {task!r}; it has {', '.join(follower.view.tasks) or 'none yet'}."
        )
    view = follower.view.tasks[task]
    job_ids = [view.job_id] if view.job_id else []
    custom_job = follower.custom_job()
    if view.is_training and custom_job is not None:
        job_ids.append(custom_job.name.rpartition("/")[2])
    reader = LogReader(settings.project)
    lines = [line for job_id in job_ids for line in reader.lines(job_id)]
    known = sorted({line.replica for line in lines})
    if replica is not None and replica not in known:
        raise InputError(
            f"{task} has no lines of replica {replica!r}; it has lines of {', '.join(known) or 'none'}."
        )
    for line in lines:
        if replica in (None, line.replica):
            click.echo(f"{line.timestamp[11:23]} {line.replica} {line.text}")


def _check_parameters(settings: Settings, compiled: Path, given: tuple[str, ...], recipe: Recipe) -> None:
    """Raise InputError for values that the trainer would refuse after staging."""
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.pretrain import trainer_config
    from penstock_trainer.contract.fields import ContractError

    declared = PipelineParameters(compiled)
    try:
        trainer_config(recipe, declared.values(given, defaults(settings, declared)))
    except ContractError as exc:
        raise InputError(str(exc)) from exc


def defaults(settings: Settings, declared: PipelineParameters) -> Mapping[str, Any]:
    """The settings' parameters. Training runs as the settings' account too, unless they say otherwise."""
    account = {"service_account": settings.service_account} if settings.service_account else {}
    return {name: value for name, value in account.items() if name in declared.names} | dict(
        settings.parameters
    )


def _follow(job: Any, settings: Settings, report_dir: Path) -> None:
    from rich.console import Console

    from penstock_pipelines.display import display_for
    from penstock_pipelines.follow import Follower
    from penstock_pipelines.summary import print_summary

    console, follower, interrupted = Console(), Follower(job, project=settings.project), False
    with display_for(console) as display:
        try:
            view = follower.follow(display)
        except KeyboardInterrupt:
            console.print("cancelling ...")
            interrupted = True
            view = follower.cancel(display)
    print_summary(console, follower, report_dir=report_dir)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0 if view.state == "SUCCEEDED" else 1)


def _sdk(settings: Settings) -> Any:
    """Google's SDK, set to the settings' project and location."""
    from google.cloud import aiplatform

    aiplatform.init(project=settings.project, location=settings.location)
    return aiplatform


def _run(settings: Settings, run_id: str) -> Any:
    from google.api_core import exceptions

    try:
        return _sdk(settings).PipelineJob.get(run_id)
    except exceptions.NotFound as exc:
        raise InputError(f"there is no run {run_id!r}; `penstock status` lists them.") from exc
