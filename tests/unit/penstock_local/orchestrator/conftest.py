"""A harness that compiles pipelines with kfp and runs them with Python functions in place of containers."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler  # only tests use kfp: the stand-in must run without it

from penstock_local.orchestrator.cache import CachedOutputs
from penstock_local.orchestrator.context import RunContext
from penstock_local.orchestrator.engine import PipelineRun, RunOutcome
from penstock_local.orchestrator.executor import TaskExit, TaskLaunch
from penstock_local.orchestrator.spec import load_pipeline
from penstock_local.orchestrator.state import TaskSnapshot, TaskState

Body = Callable[[TaskLaunch, threading.Event], Any]


def write_outputs(
    launch: TaskLaunch, parameters: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> None:
    """Leaves an executor_output.json as kfp's executor does."""
    artifacts = {
        name: {"artifacts": [{**value["artifacts"][0], "metadata": metadata or {}}]}
        for name, value in launch.executor_input["outputs"]["artifacts"].items()
    }
    content = {"parameterValues": parameters, "artifacts": artifacts}
    Path(launch.executor_input["outputs"]["outputFile"]).write_text(json.dumps(content))


class FunctionExecutor:
    """An executor whose containers are functions, by task name.

    A function may return an exit code, a TaskExit, or the output parameters; a task without a function returns its
    own name for every declared output parameter.
    """

    def __init__(self, bodies: Mapping[str, Body] | None = None) -> None:
        self.bodies = dict(bodies or {})
        self.launches: list[TaskLaunch] = []

    def run(self, launch: TaskLaunch, cancelled: threading.Event) -> TaskExit:
        self.launches.append(launch)
        declared = launch.executor_input["outputs"]["parameters"]
        body = self.bodies.get(launch.task_name, lambda *_: dict.fromkeys(declared, launch.task_name))
        result = body(launch, cancelled)
        if isinstance(result, TaskExit):
            return result
        if isinstance(result, int):
            return TaskExit(result)
        write_outputs(launch, result if result is not None else {})
        return TaskExit(0)

    def launch_of(self, task_name: str) -> TaskLaunch:
        [launch] = [launch for launch in self.launches if launch.task_name == task_name]
        return launch

    def parameters_of(self, task_name: str) -> Mapping[str, Any]:
        return self.launch_of(task_name).executor_input["inputs"]["parameterValues"]


class DictCache:
    """A cache in memory."""

    def __init__(self) -> None:
        self.entries: dict[str, CachedOutputs] = {}

    def get(self, key: str) -> CachedOutputs | None:
        return self.entries.get(key)

    def put(self, key: str, outputs: CachedOutputs) -> None:
        self.entries[key] = outputs


class Recorder:
    """A listener that keeps the last snapshot and the sequence of states of every task."""

    def __init__(self) -> None:
        self.last: dict[int, TaskSnapshot] = {}
        self.states: dict[str, list[TaskState]] = {}
        self.running = threading.Condition()

    def task_changed(self, task: TaskSnapshot) -> None:
        with self.running:
            self.last[task.task_id] = task
            states = self.states.setdefault(task.task_name, [])
            if not states or states[-1] is not task.state:
                states.append(task.state)
            self.running.notify_all()

    def wait_for(self, task_name: str, state: TaskState, attempts: int = 0) -> None:
        with self.running:
            assert self.running.wait_for(
                lambda: any(
                    task.task_name == task_name and task.state is state and len(task.attempts) >= attempts
                    for task in self.last.values()
                ),
                timeout=20,
            ), f"{task_name} did not become {state.name}"

    def task(self, task_name: str) -> TaskSnapshot:
        [task] = [task for task in self.last.values() if task.task_name == task_name]
        return task

    def final(self) -> dict[str, str]:
        return {
            task.task_name: task.state.name for task in self.last.values() if task.parent_task_id is not None
        }


@dataclass
class Harness:
    """Runs pipelines in one folder with one cache, as one service would."""

    work_dir: Path
    cache: DictCache = field(default_factory=DictCache)
    executor: FunctionExecutor = field(default_factory=FunctionExecutor)
    recorder: Recorder = field(default_factory=Recorder)
    context: RunContext = field(
        default_factory=lambda: RunContext(
            resource_name="projects/123/locations/us-central1/pipelineJobs/demo-1",
            pipeline_job_uuid="demo-1",
            project_id="demo",
            project_number="123",
            location="us-central1",
            pipeline_root="gs://bkt/runs",
            create_time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            read_object=lambda uri: f"content of {uri}".encode(),
        )
    )

    def start(
        self,
        spec: Mapping[str, Any],
        bodies: Mapping[str, Body] | None = None,
        parameters: Any = None,
        **options: Any,
    ) -> PipelineRun:
        pipeline = load_pipeline(spec)
        self.executor, self.recorder = FunctionExecutor(bodies), Recorder()
        return PipelineRun(
            pipeline,
            context=self.context,
            parameters=pipeline.resolve_parameters(parameters or {}),
            executor=options.pop("executor", self.executor),
            cache=self.cache,
            listener=self.recorder,
            work_dir=self.work_dir,
            **options,
        )

    def run(
        self, spec: Mapping[str, Any], bodies: Mapping[str, Body] | None = None, **options: Any
    ) -> RunOutcome:
        return self.start(spec, bodies, **options).run()

    def run_and_cancel(self, spec: Mapping[str, Any], bodies: Mapping[str, Body], when: str) -> RunOutcome:
        """Cancels as soon as the task `when` runs."""
        run = self.start(spec, bodies)
        outcomes: list[RunOutcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(run.run()))
        thread.start()
        self.recorder.wait_for(when, TaskState.RUNNING)
        run.cancel()
        thread.join(timeout=20)
        return outcomes[0]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "work")


@pytest.fixture
def compile_pipeline(tmp_path: Path) -> Callable[[Any], dict[str, Any]]:
    """Compiles a kfp pipeline to the spec that a client posts."""

    def compile_one(pipeline: Any) -> dict[str, Any]:
        path = tmp_path / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        spec: dict[str, Any] = next(yaml.safe_load_all(path.read_text()))
        return spec

    return compile_one
