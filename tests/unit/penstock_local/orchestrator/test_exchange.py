"""What crosses the border between the engine and a container, with kfp's and GCPC's own code on the other side."""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
from google_cloud_pipeline_components.types import artifact_types as gcpc_types
from google_cloud_pipeline_components.v1.custom_job import (  # only tests use kfp and GCPC
    CustomTrainingJobOp,
    create_custom_training_job_from_component,
)
from google_cloud_pipeline_components.v1.model import ModelUploadOp
from kfp import dsl
from kfp.dsl import executor as kfp_executor
from kfp.dsl.types import artifact_types

from penstock_local.orchestrator.executor import TaskLaunch
from penstock_local.orchestrator.state import TaskState

Compile = Callable[[Any], dict[str, Any]]

component = functools.partial(dsl.component, base_image="python:3.11")


@component
def produce(
    text: str,
    count: int,
    rate: float,
    model: dsl.Output[dsl.Model],
    nothing: Optional[str] = None,  # noqa: UP045  # kfp knows no other spelling
) -> NamedTuple("Made", [("words", list), ("count", int), ("on", bool)]):
    assert nothing is None
    assert isinstance(rate, float)
    Path(model.path).write_text(text)
    model.metadata["length"] = len(text)
    return ([text] * count, count, True)


@component
def consume(model: dsl.Input[dsl.Model], words: list, on: bool) -> str:
    return f"{Path(model.path).read_text()} {model.metadata['length']} {words} {on}"


@dsl.container_component
def tool(
    text: str,
    model: dsl.Output[dsl.Model],
    total: dsl.OutputPath(int),
    note: Optional[str] = None,  # noqa: UP045  # kfp knows no other spelling
):
    return dsl.ContainerSpec(
        image="example.com/tool",
        command=["tool", dsl.ConcatPlaceholder(["--text=", text])],
        args=[dsl.IfPresentPlaceholder("note", then=["--note", note]), model.uri, model.path, total],
    )


def test_kfps_own_executor_runs_on_our_executor_input(
    harness: Any, compile_pipeline: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_types, "_GCS_LOCAL_MOUNT_PREFIX", f"{tmp_path}/gcs/")

    @dsl.pipeline(name="real")
    def pipeline(text: str = "hi", rate: float = 1.0) -> str:
        made = produce(text=text, count=2, rate=rate)
        return consume(model=made.outputs["model"], words=made.outputs["words"], on=made.outputs["on"]).output

    functions = {"produce": produce.python_func, "consume": consume.python_func}

    class KfpExecutor:
        def run(self, launch: TaskLaunch, cancelled: threading.Event) -> Any:
            from penstock_local.orchestrator.executor import TaskExit

            executor_input = json.loads(launch.args[launch.args.index("--executor_input") + 1])
            kfp_executor.Executor(executor_input, functions[launch.task_name]).execute()
            return TaskExit(0)

    outcome = harness.run(compile_pipeline(pipeline), executor=KfpExecutor())
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    assert outcome.outputs.parameters == {"Output": "hi 2 ['hi', 'hi'] True"}
    [model] = harness.recorder.task("produce").outputs.artifacts["model"]
    assert model.metadata == {"length": 2}
    assert (tmp_path / "gcs" / model.uri.removeprefix("gs://")).read_text() == "hi"


def test_a_container_gets_its_command_resolved_and_its_output_files_read(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="tools")
    def pipeline():
        made = tool(text="a b").set_env_variable("WHERE", "{{$.pipeline_google_cloud_location}}")
        tool(text="c", note=f"{made.outputs['total']}").set_display_name("second")

    def body(launch: TaskLaunch, cancelled: threading.Event) -> int:
        Path(launch.executor_input["outputs"]["parameters"]["total"]["outputFile"]).write_text("42")
        return 0

    outcome = harness.run(compile_pipeline(pipeline), {"tool": body, "tool-2": body})
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    first, second = (harness.executor.launch_of(name) for name in ("tool", "tool-2"))
    assert first.command == ("tool", "--text=a b")
    assert first.env == {"WHERE": "us-central1"}
    uri = f"gs://bkt/runs/123/demo-1/tool_{first.task_id}/model"
    assert first.args == (
        uri,
        uri.replace("gs://", f"{first.work_dir}/gcs/"),
        str(first.work_dir / "outputs" / "total"),
    )
    assert second.args[:2] == ("--note", "42")
    assert harness.recorder.task("tool").outputs.parameters == {"total": 42}


@pytest.mark.parametrize(
    ("file", "report", "message"),
    [
        (None, {}, "'total' is missing"),
        ("4.5", {}, "'total': got 4.5 (float), want NUMBER_INTEGER"),
        ("many", {}, "'total': got the text 'many'"),
        (None, {"parameterValues": {"total": "4"}}, "'total': got \"4\" (str), want NUMBER_INTEGER"),
        ("4", {"parameterValues": {"typo": 1}}, "the parameter 'typo'; the component declares: total"),
        ("4", {"artifacts": {"typo": {}}}, "the artifact 'typo'; the component declares: model"),
        ("4", {"typo": 1}, "not an ExecutorOutput"),
        ("4", {"artifacts": {"model": {"artifacts": [{"metadata": {"x": "y" * 140_000}}]}}}, "bytes of JSON"),
    ],
)
def test_a_container_that_leaves_wrong_outputs_fails(
    harness: Any, compile_pipeline: Compile, file: str | None, report: dict[str, Any], message: str
) -> None:
    @dsl.pipeline(name="tools")
    def pipeline():
        tool(text="a")

    def body(launch: TaskLaunch, cancelled: threading.Event) -> int:
        outputs = launch.executor_input["outputs"]
        if file is not None:
            Path(outputs["parameters"]["total"]["outputFile"]).write_text(file)
        Path(outputs["outputFile"]).write_text(json.dumps(report))
        return 0

    assert harness.run(compile_pipeline(pipeline), {"tool": body}).state is TaskState.FAILED
    assert message in harness.recorder.task("tool").error.message


def test_a_container_may_move_its_artifact_but_not_rename_it(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="tools")
    def pipeline():
        tool(text="a")

    def body(launch: TaskLaunch, cancelled: threading.Event) -> int:
        outputs = launch.executor_input["outputs"]
        Path(outputs["parameters"]["total"]["outputFile"]).write_text("1")
        model = {
            "name": "mine",
            "uri": "https://x/models/1",
            "metadata": {"resourceName": "models/1", "n": 1},
        }
        Path(outputs["outputFile"]).write_text(json.dumps({"artifacts": {"model": {"artifacts": [model]}}}))
        return 0

    harness.run(compile_pipeline(pipeline), {"tool": body})
    [model] = harness.recorder.task("tool").outputs.artifacts["model"]
    assert (model.uri, model.metadata) == ("https://x/models/1", {"resourceName": "models/1", "n": 1})
    assert model.name.startswith("projects/123/locations/us-central1/metadataStores/default/artifacts/")


def test_an_importer_resolves_its_uri_and_metadata(harness: Any, compile_pipeline: Compile) -> None:
    @component
    def read(data: dsl.Input[dsl.Dataset]) -> str:
        return data.uri

    @dsl.pipeline(name="import")
    def pipeline(day: str):
        for imported in (
            dsl.importer(f"gs://b/{day}", dsl.Dataset, metadata={"day": day, "n": 1}),
            dsl.importer("gs://b/fixed", dsl.Dataset, reimport=True),
            dsl.importer(day, dsl.Dataset),
        ):
            read(data=imported.output)

    spec = compile_pipeline(pipeline)
    assert harness.run(spec, parameters={"day": "monday"}).state is TaskState.SUCCEEDED
    imported = [
        harness.recorder.task(name).outputs.artifacts["artifact"][0]
        for name in ("importer", "importer-2", "importer-3")
    ]
    assert [artifact.uri for artifact in imported] == ["gs://b/monday", "gs://b/fixed", "monday"]
    assert imported[0].metadata == {"day": "monday", "n": 1}
    harness.run(spec, parameters={"day": "monday"})
    final = harness.recorder.final()
    assert [final[name] for name in ("read", "read-2", "read-3")] == ["SKIPPED", "SUCCEEDED", "SKIPPED"]


def test_the_custom_job_launcher_gets_a_fully_resolved_payload(
    harness: Any, compile_pipeline: Compile
) -> None:
    @component
    def word() -> str:
        return "up"

    @dsl.pipeline(name="train")
    def pipeline(steps: int, rate: float = 0.5):
        up = word()
        CustomTrainingJobOp(
            display_name="train",
            base_output_directory=f"{dsl.PIPELINE_ROOT_PLACEHOLDER}/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}/train",
            worker_pool_specs=[
                {
                    "replica_count": 2,
                    "machine_spec": {"machine_type": "n1-standard-4"},
                    "container_spec": {
                        "image_uri": "example.com/trainer",
                        "args": [f"--steps={steps}", f"--rate={rate}", f"--up={up.output}"],
                        "env": [{"name": "JOB", "value": "{{$.pipeline_job_resource_name}}"}],
                    },
                }
            ],
        )

    hostile = 'say "{{$.pipeline_root}}"'
    bodies = {
        "word": lambda *_: {"Output": hostile},
        "custom-training-job": lambda *_: {"gcp_resources": "{}"},
    }
    outcome = harness.run(compile_pipeline(pipeline), bodies, parameters={"steps": 7})
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    launch = harness.executor.launch_of("custom-training-job")
    arguments = dict(zip(launch.args[::2], launch.args[1::2], strict=True))
    assert arguments["--project"] == "demo"
    assert arguments["--location"] == "us-central1"
    assert arguments["--gcp_resources"] == str(launch.work_dir / "outputs" / "gcp_resources")
    assert json.loads(arguments["--payload"]) == {
        "display_name": "train",
        "job_spec": {
            "worker_pool_specs": [
                {
                    "replica_count": 2,
                    "machine_spec": {"machine_type": "n1-standard-4"},
                    "container_spec": {
                        "image_uri": "example.com/trainer",
                        "args": ["--steps=7", "--rate=0.5", f"--up={hostile}"],
                        "env": [{"name": "JOB", "value": harness.context.resource_name}],
                    },
                }
            ],
            "scheduling": {
                "timeout": "604800s",
                "restart_job_on_worker_restart": False,
                "strategy": "STANDARD",
                "max_wait_duration": "86400s",
            },
            "service_account": "",
            "tensorboard": "",
            "enable_web_access": False,
            "network": "",
            "reserved_ip_ranges": [],
            "base_output_directory": {"output_uri_prefix": "gs://bkt/runs/demo-1/train"},
            "persistent_resource_id": "",
            "psc_interface_config": {},
        },
        "labels": {},
        "encryption_spec": {"kms_key_name": ""},
    }


def test_a_component_inside_a_custom_job_gets_its_executor_input(
    harness: Any, compile_pipeline: Compile
) -> None:
    wrapped = create_custom_training_job_from_component(produce, display_name="wrapped")

    @dsl.pipeline(name="wrapped")
    def pipeline():
        wrapped(text='quote " and \\', count=2, rate=0.5)

    bodies = {"produce": lambda *_: {"gcp_resources": "{}", "words": [], "count": 1, "on": True}}
    outcome = harness.run(compile_pipeline(pipeline), bodies)
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    launch = harness.executor.launch_of("produce")
    payload = json.loads(launch.args[launch.args.index("--payload") + 1])
    args = payload["job_spec"]["worker_pool_specs"][0]["container_spec"]["args"]
    inner = json.loads(args[args.index("--executor_input") + 1])
    assert inner["inputs"]["parameterValues"]["text"] == 'quote " and \\'
    assert inner["outputs"] == launch.executor_input["outputs"]


def test_the_model_upload_launcher_gets_its_payload_and_its_model(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="upload")
    def pipeline():
        container = {"imageUri": "example.com/serve"}
        imported = dsl.importer(
            "gs://b/model", gcpc_types.UnmanagedContainerModel, metadata={"containerSpec": container}
        )
        ModelUploadOp(
            display_name="m", unmanaged_container_model=imported.output, version_aliases=["challenger"]
        )

    bodies = {"model-upload": lambda *_: {"gcp_resources": "{}"}}
    outcome = harness.run(compile_pipeline(pipeline), bodies)
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    launch = harness.executor.launch_of("model-upload")
    payload = json.loads(launch.args[launch.args.index("--payload") + 1])
    assert payload["version_aliases"] == ["challenger"]
    assert payload["pipeline_job"] == "projects/demo/locations/us-central1/pipelineJobs/demo-1"
    assert "--parent_model_name" not in launch.args
    executor_input = json.loads(launch.args[launch.args.index("--executor_input") + 1])
    [model] = executor_input["inputs"]["artifacts"]["unmanaged_container_model"]["artifacts"]
    assert model["metadata"] == {"containerSpec": {"imageUri": "example.com/serve"}}
    assert (
        executor_input["outputs"]["artifacts"]["model"]["artifacts"][0]["type"]["schemaTitle"]
        == "google.VertexModel"
    )
