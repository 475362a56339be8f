"""The `penstock` command. Heavy libraries are imported by the verb that needs them, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock_pipelines.errors import InputError, PenstockError, ServiceError
from penstock_pipelines.local import (
    DEFAULT_STATE,
    find_server,
    is_state,
    reset_state,
    server_on,
    start_server,
)
from penstock_pipelines.settings import Settings, load_settings

if TYPE_CHECKING:
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.recipe import Recipe

_EXIT_INTERRUPTED = 130
_REENTERED = "PENSTOCK_REENTERED"

_state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    default=DEFAULT_STATE,
    show_default=True,
    help="State directory of the stand-in.",
)
_parameter_option = click.option(
    "-p", "--param", "parameters", multiple=True, metavar="NAME=VALUE", help="Run time parameter; repeatable."
)
_images_option = click.option(
    "--images",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Image map (TOML) for further images.",
)
_allow_tags_option = click.option(
    "--allow-tags", is_flag=True, help="Compile although our images have no digest."
)


class _Command(click.Group):
    """Shows errors of ours as one message and ends with their exit code."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PenstockError as exc:
            click.echo(f"error: {exc}", err=True)
            context.exit(exc.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(_EXIT_INTERRUPTED)
        except Exception as exc:
            # Told by its module: importing Google's exceptions here would cost every verb their import.
            if not type(exc).__module__.startswith(("google.auth", "google.api_core")):
                raise
            click.echo(f"error: {exc}", err=True)
            context.exit(ServiceError.exit_code)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path),
    help="Settings file; default penstock.toml.",
)
@click.version_option(package_name="penstock")
@click.pass_context
def main(context: click.Context, settings_file: Path | None) -> None:
    """Distributed training pipelines: compile, run on the embedded stand-in, submit to Vertex AI.

    Exit codes: 0 ok, 1 a run that failed, 2 wrong input, 3 the service, 130 interrupted.
    """
    context.obj = settings_file


@main.command("compile")
@click.argument("recipe", default="tiny-zero2")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: build/<recipe>.yaml.")
@_allow_tags_option
@click.pass_obj
def compile_(settings_file: Path | None, recipe: str, output: Path | None, allow_tags: bool) -> None:
    """Compile RECIPE to a pipeline spec; prints its SHA-256."""
    path, digest, _ = _compile(load_settings(settings_file), recipe, output, allow_tags)
    click.echo(f"{digest}  {path}")


@main.command()
@click.argument("recipe", default="tiny-zero2")
@_state_option
@click.option("--reset", is_flag=True, help="Delete the state directory first.")
@click.option(
    "--prepare", type=click.Path(exists=True, path_type=Path), help="Python script to run before the submit."
)
@_images_option
@click.option("--run-id", help="PipelineJob id; default: recipe and time.")
@_parameter_option
@_allow_tags_option
@click.pass_obj
def run(
    settings_file: Path | None,
    recipe: str,
    state: Path,
    reset: bool,
    prepare: Path | None,
    images: Path | None,
    run_id: str | None,
    parameters: tuple[str, ...],
    allow_tags: bool,
) -> None:
    """Compile RECIPE and run that file on the stand-in, to the end."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # `timeout`, CI, a closed terminal: leave nothing behind
        signal.signal(number, signal.default_int_handler)
    settings = load_settings(settings_file)
    path, digest, found = _compile(settings, recipe, None, allow_tags)
    _check_parameters(settings, path, parameters, found)
    click.echo(f"compiled {path} (sha256 {digest})")
    if reset:
        reset_state(state)
    with server_on(state, settings, images=images) as server:
        click.echo(f"stand-in: project {settings.project}, state {state}, port {server.front_port}")
        environment = server.environment() | {"PENSTOCK_BUCKET": settings.bucket}
        code = _child([str(prepare)], environment) if prepare else 0
        if code != 0:
            click.echo(f"error: the script {prepare} ended with code {code}; nothing was submitted", err=True)
        else:
            arguments = [
                *_this_command(settings_file),
                "submit",
                str(path),
                "--report-dir",
                str(state / "reports"),
            ]
            arguments += ["--run-id", run_id] if run_id else []
            code = _child([*arguments, *(f"--param={text}" for text in parameters)], environment)
    sys.exit(code)


@main.command()
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
@_parameter_option
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
    values = declared.values(parameters, _defaults(settings, declared))
    run_id = run_id or f"{declared.pipeline_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    submission = Submission(compiled=compiled, run_id=run_id, parameters=values, enable_caching=caching)
    job = send(submission, settings)
    click.echo(f"run {job.resource_name}\n{job._dashboard_uri()}")
    if not detach:
        _follow(job, settings, report_dir)


@main.command()
@click.argument("run_id", required=False)
@_state_option
@click.pass_obj
def status(settings_file: Path | None, run_id: str | None, state: Path) -> None:
    """Runs and their states, or the tasks of RUN_ID. Asks the stand-in if one runs on --state, else Vertex AI."""
    _reenter_with(state, settings_file)
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


@main.command()
@click.argument("run_id")
@click.option("--task", default="custom-training-job", help="Name of the task; training by default.")
@click.option("--replica", help="Only this replica of training, such as workerpool1-0.")
@_state_option
@click.pass_obj
def logs(settings_file: Path | None, run_id: str, task: str, replica: str | None, state: Path) -> None:
    """Lines of a task of RUN_ID, or of the training replicas."""
    _reenter_with(state, settings_file)
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


@main.group()
def schedule() -> None:
    """Schedules that retrain."""


@schedule.command("create")
@click.argument("compiled", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cron", required=True, help='Such as "TZ=Europe/Berlin 0 3 * * 1".')
@click.option("--name", help="Display name; default: the pipeline's.")
@click.option("--max-runs", type=click.IntRange(min=1), help="Runs after which the schedule is complete.")
@_parameter_option
@_state_option
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
    _reenter_with(state, settings_file)
    from google.api_core import exceptions

    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.submit import Submission, pipeline_job

    settings = load_settings(settings_file)
    declared = PipelineParameters(compiled)
    values = declared.values(parameters, _defaults(settings, declared))
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


@main.group()
def local() -> None:
    """The stand-in as a background server."""


@local.command()
@_state_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the front door; 0 takes a free one."
)
@_images_option
@click.pass_obj
def up(settings_file: Path | None, state: Path, port: int, images: Path | None) -> None:
    """Start it; it goes on until `penstock local down`."""
    if find_server(state) is not None:
        raise InputError(
            f"a stand-in is running on {state} already; `penstock local env` shows how to reach it."
        )
    server = start_server(state, load_settings(settings_file), port=port, images=images)
    click.echo(f"stand-in on 127.0.0.1:{server.front_port}, process {server.pid}, state {state}")


@local.command()
@_state_option
def env(state: Path) -> None:
    """Print the variables that lead any client to it: eval "$(penstock local env)"."""
    server = find_server(state)
    if server is None:
        raise InputError(
            f"no stand-in is running on {state}; start one with `penstock local up --state {state}`."
        )
    for name in server.unset:
        click.echo(f"unset {name}")
    for name, value in server.variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@local.command()
@_state_option
def down(state: Path) -> None:
    """Cancel what it runs and end it."""
    server = find_server(state)
    if server is None:
        click.echo(f"no stand-in is running on {state}")
        return
    server.stop()
    click.echo("stopped")


def _compile(
    settings: Settings, name: str, output: Path | None, allow_tags: bool
) -> tuple[Path, str, Recipe]:
    from penstock_components.jobs.pools import JobSpecError
    from penstock_components.machines.catalogue import MachineError
    from penstock_pipelines.compile import compile_recipe
    from penstock_pipelines.images import ImageError
    from penstock_pipelines.recipes import UnknownRecipeError, find_recipe
    from penstock_trainer.contract.fields import ContractError

    try:
        recipe = find_recipe(name)
        path = output or Path("build") / f"{recipe.name}.yaml"
        allowed = allow_tags or settings.allow_tags
        digest = compile_recipe(recipe, settings.images, path, location=settings.location, allow_tags=allowed)
    except (UnknownRecipeError, ImageError, JobSpecError, MachineError, ContractError) as exc:
        raise InputError(str(exc)) from exc
    return path, digest, recipe


def _check_parameters(settings: Settings, compiled: Path, given: tuple[str, ...], recipe: Recipe) -> None:
    """Raise InputError for values that the trainer would refuse after staging."""
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.pretrain import trainer_config
    from penstock_trainer.contract.fields import ContractError

    declared = PipelineParameters(compiled)
    try:
        trainer_config(recipe, declared.values(given, _defaults(settings, declared)))
    except ContractError as exc:
        raise InputError(str(exc)) from exc


def _defaults(settings: Settings, declared: PipelineParameters) -> Mapping[str, Any]:
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
        sys.exit(_EXIT_INTERRUPTED)
    sys.exit(0 if view.state == "SUCCEEDED" else 1)


def _child(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run Python with `arguments`; its exit code as a shell shows it.

    Ctrl-C reaches the child as well: it cancels, and is waited for. SIGTERM and SIGHUP
    are passed on as the same.
    """
    process = subprocess.Popen([sys.executable, *arguments], env=dict(environment))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


def _this_command(settings_file: Path | None) -> list[str]:
    return ["-m", "penstock_pipelines.cli", *(["--settings", str(settings_file)] if settings_file else [])]


def _reenter_with(state: Path, settings_file: Path | None) -> None:
    """Where `state` is a stand-in's, start this very command again in the environment of that stand-in.

    One that does not run is started for as long as the command takes. In such an environment already: nothing to do.
    """
    if not is_state(state) or _REENTERED in os.environ:
        return
    running = find_server(state)
    with (
        contextlib.nullcontext(running)
        if running
        else server_on(state, load_settings(settings_file)) as server
    ):
        code = _child(
            ["-m", "penstock_pipelines.cli", *sys.argv[1:]], server.environment() | {_REENTERED: "1"}
        )
    sys.exit(code)


def _sdk(settings: Settings) -> Any:
    from google.cloud import aiplatform

    aiplatform.init(project=settings.project, location=settings.location)
    return aiplatform


def _run(settings: Settings, run_id: str) -> Any:
    from google.api_core import exceptions

    try:
        return _sdk(settings).PipelineJob.get(run_id)
    except exceptions.NotFound as exc:
        raise InputError(f"there is no run {run_id!r}; `penstock status` lists them.") from exc


if __name__ == "__main__":
    main()
