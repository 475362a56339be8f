"""The component definitions, as kfp compiles them."""

import importlib
import inspect
from dataclasses import fields

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler, dsl

NAMES = [
    "fingerprint",
    "stage_data",
    "sync_checkpoint",
    "evaluate",
    "gate",
    "register_model",
    "record_status",
]
IMAGE = "europe-docker.pkg.dev/p/r/components:1"


def definition(name):
    return getattr(importlib.import_module(f"penstock_components.{name}"), name)(IMAGE)


def spec(name):
    told = json_format.MessageToDict(definition(name).pipeline_spec)
    return told["components"][f"comp-{name.replace('_', '-')}"], told["deploymentSpec"]["executors"]


@pytest.mark.parametrize("name", NAMES)
def test_every_input_has_a_description(name):
    inputs = spec(name)[0].get("inputDefinitions", {})
    for kind in inputs.values():
        for given, told in kind.items():
            assert told.get("description"), given


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_its_launcher_on_the_whole_executor_input(name):
    (executor,) = spec(name)[1].values()
    assert executor["container"] == {
        "image": IMAGE,
        "command": ["python", "-m", f"penstock_components.launchers.{name}"],
        "args": ["--executor-input", "{{$}}"],
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_launcher_reads_the_parameters_that_the_definition_declares(name):
    launcher = importlib.import_module(f"penstock_components.launchers.{name}")
    reads = launcher.Thresholds if name == "gate" else launcher.Inputs
    declared = spec(name)[0]["inputDefinitions"].get("parameters", {})
    assert {field.name for field in fields(reads)} == set(declared)
    assert inspect.isfunction(launcher.main)


@pytest.mark.parametrize(
    ("name", "parameter", "default"),
    [
        ("stage_data", "vocab_size", 4096),
        ("stage_data", "tokenizer_uri", ""),
        ("stage_data", "eval_fraction", 0.02),
        ("stage_data", "required_tokens", 0),
        ("evaluate", "max_bytes", 0),
        ("evaluate", "project", "{{$.pipeline_google_cloud_project_id}}"),
        ("evaluate", "location", "{{$.pipeline_google_cloud_location}}"),
        ("gate", "min_improvement_over_champion", 0.0),
        ("register_model", "run_name", "{{$.pipeline_job_name}}"),
        ("record_status", "pipeline_root", "{{$.pipeline_root}}"),
    ],
)
def test_defaults(name, parameter, default):
    assert spec(name)[0]["inputDefinitions"]["parameters"][parameter]["defaultValue"] == default


def test_the_registered_version_is_a_vertex_model():
    outputs = spec("register_model")[0]["outputDefinitions"]["artifacts"]
    assert outputs["registered"]["artifactType"]["schemaTitle"] == "google.VertexModel"


def test_they_join_into_a_pipeline(tmp_path):
    components = {name: definition(name) for name in NAMES}

    @dsl.pipeline(name="joined")
    def joined(source_uri: str, gcp_resources: str):
        with dsl.ExitHandler(components["record_status"]()):
            fingerprint = components["fingerprint"](source_uri=source_uri)
            data = components["stage_data"](
                source_uri=source_uri, fingerprint=fingerprint.outputs["fingerprint"]
            )
            sync = components["sync_checkpoint"](
                gcp_resources=gcp_resources, train_directory="gs://b/train"
            ).after(data)
            evaluation = components["evaluate"](
                model=sync.outputs["model"], dataset_uri=data.outputs["uri"], model_id="m"
            )
            verdict = components["gate"](evaluation=evaluation.outputs["evaluation"])
            with dsl.If(verdict.outputs["register"] == True):  # noqa: E712  # kfp records the comparison
                components["register_model"](
                    model=sync.outputs["model"],
                    verdict=verdict.outputs["verdict"],
                    model_id="m",
                    serving_image="vllm:1",
                )

    path = tmp_path / "joined.yaml"
    compiler.Compiler().compile(joined, str(path))
    told = yaml.safe_load(path.read_text())
    assert len(told["deploymentSpec"]["executors"]) == len(NAMES)
