"""What `train` puts into a compiled pipeline."""

from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.resources import Resources
from penstock_components.train import train
from penstock_trainer.contract.config import JobConfig

RESOURCES = Resources(machine=MachineSpec(machine_type="n2-standard-8"), num_nodes=3)
PLACE: dict[str, Any] = {
    "resources": RESOURCES,
    "image": "europe-docker.pkg.dev/p/r/trainer:1",
    "location": "europe-west4",
    "display_name": "train-mine",
}


def compiled(**arguments: Any) -> Any:
    """The task of a pipeline that has one parameter, `epochs`, in the compiled form."""

    @dsl.pipeline(name="scripted")
    def scripted(epochs: int = 3) -> None:
        runtime = dict.fromkeys(arguments.pop("runtime_names", []), epochs)
        train(**PLACE, **arguments, runtime=runtime)

    told = json_format.MessageToDict(scripted.pipeline_spec)
    return told["root"]["dag"]["tasks"]["custom-training-job"]


def inputs_of(task: Any) -> Any:
    return {
        name: given["runtimeValue"]["constant"]
        for name, given in task["inputs"]["parameters"].items()
        if "runtimeValue" in given
    }


def test_a_command_runs_through_the_launcher_on_every_node() -> None:
    task = compiled(
        command=["python", "train.py", "--data=gs://b/a b"],
        runtime_names=["epochs", "n.epochs"],
        checkpoint_dir="/ckpt",
        max_restarts=0,
        processes_per_node=2,
    )
    container = {
        "image_uri": "europe-docker.pkg.dev/p/r/trainer:1",
        "command": ["python", "-m", "penstock_trainer"],
        "args": [
            *("launch", "--processes-per-node=2", "--max-restarts=0", "--checkpoint-dir=/ckpt", "--"),
            *("python", "train.py", "--data=gs://b/a b"),
            "--epochs={{$.inputs.parameters['pipelinechannel--epochs']}}",
            "--n.epochs={{$.inputs.parameters['pipelinechannel--epochs']}}",
        ],
    }
    pool = {
        "machine_spec": {"machine_type": "n2-standard-8"},
        "container_spec": container,
    }
    told = inputs_of(task)
    assert told["worker_pool_specs"] == [{**pool, "replica_count": 1.0}, {**pool, "replica_count": 2.0}]
    assert told["base_output_directory"] == "{{$.pipeline_root}}/{{$.pipeline_job_name}}/train"
    assert told["display_name"] == "train-mine"
    assert task["cachingOptions"] == {}


def test_without_options_the_launchers_defaults_hold() -> None:
    [primary, _] = inputs_of(compiled(command=["./train"]))["worker_pool_specs"]
    assert primary["container_spec"]["args"] == ["launch", "--", "./train"]


def test_a_config_goes_to_the_trainer_as_before() -> None:
    [primary, _] = inputs_of(compiled(config=JobConfig(), runtime_names=["steps"]))["worker_pool_specs"]
    config, steps = primary["container_spec"]["args"]
    assert config.startswith("--config={")
    assert steps == "--steps={{$.inputs.parameters['pipelinechannel--epochs']}}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "got neither config nor command"),
        ({"config": JobConfig(), "command": ["python"]}, "got both config and command"),
        ({"command": []}, "command names no program"),
        ({"command": [""]}, "command names no program"),
        ({"command": "python train.py"}, "command is the text 'python train.py': give its words as a list"),
        ({"command": ["python train.py"]}, "command[0] is 'python train.py', a shell line"),
        ({"command": ["cd/x;train"]}, "command[0] is 'cd/x;train', a shell line"),
        ({"command": ["python", 3]}, "command[1] is 3: it must be text"),
        ({"command": ["python"], "runtime_names": ["--epochs"]}, "runtime option '--epochs' is not the name"),
        ({"command": ["python"], "max_restarts": -1}, "max_restarts -1 must be 0 or more"),
        ({"command": ["python"], "processes_per_node": 0}, "processes_per_node 0 must be at least 1"),
        ({"config": JobConfig(), "checkpoint_dir": "/ckpt"}, "checkpoint_dir go with command"),
    ],
)
def test_what_would_not_start_as_meant_is_refused_when_compiling(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobSpecError) as caught:
        compiled(**arguments)
    assert told in str(caught.value)


def test_an_account_given_to_the_task_is_the_jobs() -> None:
    board = "projects/1/locations/europe-west4/tensorboards/2"
    place = PLACE | {"resources": Resources(machine="n2-standard-8", tensorboard=board)}

    @dsl.pipeline(name="accounted")
    def accounted(account: str) -> None:
        train(command=["python", "train.py"], service_account=account, **place)

    told = json_format.MessageToDict(accounted.pipeline_spec)
    given = told["root"]["dag"]["tasks"]["custom-training-job"]["inputs"]["parameters"]
    assert given["service_account"] == {"componentInputParameter": "account"}
    assert given["tensorboard"] == {"runtimeValue": {"constant": board}}
