"""Component `train`: GCPC's CustomTrainingJobOp, filled in from a typed job spec and the trainer's config or a command."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.gcpc import to_gcpc
from penstock_components.jobs.messages import ContainerSpec, EnvVar
from penstock_components.jobs.resources import Resources
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import peak_tflops
from penstock_trainer.contract.config import JobConfig, compile_time_json

TRAIN_DIRECTORY = f"{dsl.PIPELINE_ROOT_PLACEHOLDER}/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}/train"
"""Where a run's checkpoints and export lie: the same over replica, job and task retries, another for each run."""

_SHELL = re.compile(r"[\s|&;<>$`]")
_OPTION = re.compile(r"[A-Za-z0-9][\w.-]*")


@overload
def train(
    config: JobConfig,
    *,
    runtime: Mapping[str, Any] | None = None,
    resources: Resources,
    image: str,
    location: str,
    display_name: str,
    env: Mapping[str, Any] | None = None,
    service_account: Any = "",
) -> dsl.PipelineTask: ...


@overload
def train(
    *,
    command: Sequence[str],
    runtime: Mapping[str, Any] | None = None,
    resources: Resources,
    image: str,
    location: str,
    display_name: str,
    checkpoint_dir: str = "",
    max_restarts: int | None = None,
    processes_per_node: int | None = None,
    env: Mapping[str, Any] | None = None,
    service_account: Any = "",
) -> dsl.PipelineTask: ...


def train(
    config: JobConfig | None = None,
    *,
    command: Sequence[str] | None = None,
    runtime: Mapping[str, Any] | None = None,
    resources: Resources,
    image: str,
    location: str,
    display_name: str,
    checkpoint_dir: str = "",
    max_restarts: int | None = None,
    processes_per_node: int | None = None,
    env: Mapping[str, Any] | None = None,
    service_account: Any = "",
) -> dsl.PipelineTask:
    """The task that trains, for use inside a pipeline function: with our trainer, or with anybody's command.

    With `config`, an observe.peak_tflops that was left at 0 becomes the catalogue's for the machine's accelerator and the
    config's precision, where it knows one. `runtime` maps dotted fields of the config to pipeline parameters or task outputs: they become flags
    behind `--config`, which holds everything else as JSON. Raises ContractError for a field that does not exist.

    With `command`, a program and its arguments, each node runs it once per accelerator through
    `python -m penstock_trainer launch`, so the image has to hold penstock_trainer beside the script. `runtime` maps
    names of the command's own options to values: each is appended as `--name=value`. What ranks write into
    `checkpoint_dir` is kept under TRAIN_DIRECTORY and restored. `max_restarts` and `processes_per_node` are the
    launcher's, with its defaults. Raises JobSpecError for a command that would not start as meant, and when both or
    neither are given.

    `env` maps names of environment variables to values. It and `service_account` take pipeline parameters; a
    service_account that is given here wins over that of `resources`. Raises JobSpecError with every fault of the job.
    """
    runtime = runtime or {}
    if (config is None) == (command is None):
        raise JobSpecError(
            f"train() got {'neither config nor' if config is None else 'both config and'} command; give one: a "
            "JobConfig for the trainer of this repository, or command=[...] for a program of your own."
        )
    options = _launch_options(checkpoint_dir, max_restarts, processes_per_node)
    if command is not None:
        args = _command_args(command, options, runtime)
    elif config is not None:
        args = _config_args(_with_peak(config, resources), options, runtime)
    container = ContainerSpec(
        image_uri=image,
        command=("python", "-m", "penstock_trainer"),
        args=args,
        env=tuple(EnvVar(name=name, value=str(value)) for name, value in sorted((env or {}).items())),
    )
    is_given = service_account is not None and service_account != ""
    if is_given:
        resources = replace(resources, service_account=str(service_account))
    job = resources.custom_job(
        container,
        display_name=display_name,
        base_output_directory=TRAIN_DIRECTORY,
        context=Context(
            location=location,
            strategy=config.engine.strategy if config is not None else "",
            through_gcpc=True,
        ),
    )
    given = {"service_account": service_account} if is_given else {}
    return CustomTrainingJobOp(**(to_gcpc(job) | given)).set_caching_options(False)


def _with_peak(config: JobConfig, resources: Resources) -> JobConfig:
    if config.observe.peak_tflops:
        return config
    peak = peak_tflops(resources.topology.machine.accelerator_type, config.engine.precision)
    return replace(config, observe=replace(config.observe, peak_tflops=peak))


def _config_args(
    config: JobConfig, options: Mapping[str, str], runtime: Mapping[str, Any]
) -> tuple[str, ...]:
    if options:
        raise JobSpecError(
            f"{', '.join(options)} go with command; in a JobConfig, max_restarts and processes_per_node are fields, and "
            "checkpoints are written to storage directly."
        )
    compile_time = compile_time_json(config, runtime=list(runtime))
    return (f"--config={compile_time}", *_flags(runtime))


def _command_args(
    command: Sequence[str], options: Mapping[str, str], runtime: Mapping[str, Any]
) -> tuple[str, ...]:
    _check_command(command)
    for name in runtime:
        if not _OPTION.fullmatch(name):
            raise JobSpecError(
                f"runtime option {name!r} is not the name of an option: give it without dashes and value, as in "
                '{"learning-rate": learning_rate}.'
            )
    launch = _flags({name.replace("_", "-"): value for name, value in options.items()})
    return ("launch", *launch, "--", *command, *_flags(runtime))


def _check_command(command: Sequence[str]) -> None:
    if isinstance(command, str):
        raise JobSpecError(
            f"command is the text {command!r}: give its words as a list, as in "
            'command=["python", "train.py", "--epochs=3"]; no shell would take it apart.'
        )
    for index, word in enumerate(command):
        if not isinstance(word, str):
            raise JobSpecError(
                f"command[{index}] is {word!r}: it must be text. Pipeline parameters go into runtime."
            )
    if not command or not command[0]:
        raise JobSpecError('command names no program; give one, as in command=["python", "train.py"].')
    if _SHELL.search(command[0]):
        raise JobSpecError(
            f"command[0] is {command[0]!r}, a shell line: it must be a program alone. Give each word as an element of "
            'its own, or, where it takes a shell, command=["sh", "-c", "..."].'
        )


def _launch_options(
    checkpoint_dir: str, max_restarts: int | None, processes_per_node: int | None
) -> dict[str, str]:
    """The launcher's options that are given."""
    if max_restarts is not None and max_restarts < 0:
        raise JobSpecError(f"max_restarts {max_restarts} must be 0 or more.")
    if processes_per_node is not None and processes_per_node < 1:
        raise JobSpecError(f"processes_per_node {processes_per_node} must be at least 1.")
    given = {
        "processes_per_node": processes_per_node,
        "max_restarts": max_restarts,
        "checkpoint_dir": checkpoint_dir or None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _flags(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in values.items())
