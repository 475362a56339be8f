import copy
from collections.abc import Callable
from typing import Any

import pytest
from kfp import dsl  # only tests use kfp

from penstock_local.orchestrator.errors import InvalidSpecError, SpecError, UnsupportedSpecError
from penstock_local.orchestrator.spec import load_pipeline

Compile = Callable[[Any], dict[str, Any]]


@dsl.container_component
def step(text: str, number: int = 3, result: dsl.OutputPath(str) = None):
    return dsl.ContainerSpec(image="example.com/step:1", command=["run"], args=[text, number, result])


@dsl.component(base_image="python:3.11")
def items() -> list[dict[str, str]]:
    return []


@dsl.pipeline(name="small")
def small(
    text: str,
    steps: int = 10,
    rate: float = 0.1,
    fast: bool = False,
    names: list = ["a"],  # noqa: B006  # kfp reads it, nobody changes it
    extra: dict = {"n": 1},  # noqa: B006
):
    first = step(text=text, number=steps)
    step(text=first.outputs["result"])


@pytest.fixture
def spec(compile_pipeline: Compile) -> dict[str, Any]:
    return compile_pipeline(small)


def test_defaults_are_filled_in_with_their_declared_types(spec: dict[str, Any]) -> None:
    values = load_pipeline(spec).resolve_parameters({"text": "x", "rate": 1})
    assert values == {"text": "x", "steps": 10, "rate": 1.0, "fast": False, "names": ["a"], "extra": {"n": 1}}
    assert [type(values[name]) for name in ("steps", "rate")] == [int, float]


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({}, "text", "requires a STRING"),
        ({"text": "x", "step": 1}, "step", "did you mean 'steps'?"),
        ({"text": "x", "steps": 1.5}, "steps", "got 1.5 (float), want NUMBER_INTEGER"),
        ({"text": "x", "steps": True}, "steps", "want NUMBER_INTEGER"),
        ({"text": 5}, "text", "want STRING"),
        ({"text": "x", "fast": "true"}, "fast", "want BOOLEAN"),
        ({"text": "x", "names": {}}, "names", "want LIST"),
        ({"text": "x", "extra": []}, "extra", "want STRUCT"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    spec: dict[str, Any], values: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(InvalidSpecError) as error:
        load_pipeline(spec).resolve_parameters(values)
    assert error.value.path == f"runtimeConfig.parameterValues['{path}']"
    assert message in error.value.message


def test_images_are_listed_with_the_path_of_their_field(spec: dict[str, Any]) -> None:
    executor = "pipelineSpec.deploymentSpec.executors"
    assert sorted(load_pipeline(spec).images()) == [
        (f"{executor}['exec-step'].container.image", "example.com/step:1"),
        (f"{executor}['exec-step-2'].container.image", "example.com/step:1"),
    ]


TASK = "root.dag.tasks.step"
EXECUTOR = "deploymentSpec.executors.exec-step"
INPUT = "components.comp-step.inputDefinitions.parameters.text"


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("schemaVersion", "2.0.0", UnsupportedSpecError, "pipelineSpec.schemaVersion: '2.0.0'"),
        ("typo", 1, InvalidSpecError, "typo"),
        (f"{TASK}.typo", 1, InvalidSpecError, "typo"),
        (f"{EXECUTOR}.container.typo", 1, InvalidSpecError, "pipelineSpec.deploymentSpec: "),
        ("pipelineInfo.name", "", InvalidSpecError, "pipelineSpec.pipelineInfo.name"),
        (f"{TASK}.cachingOptions.cacheKey", "k", UnsupportedSpecError, "tasks['step'].cachingOptions.cacheKey"),
        (f"{TASK}.componentRef.name", "comp-typo", InvalidSpecError, "tasks['step'].componentRef.name: 'comp-typo'"),
        (f"{TASK}.triggerPolicy", {"condition": "1 +"}, InvalidSpecError, "tasks['step'].triggerPolicy.condition"),
        (f"{TASK}.parameterIterator", {"itemInput": "text", "items": {"raw": "[1]"}}, UnsupportedSpecError, "tasks['step'].parameterIterator"),
        (f"{TASK}.inputs.parameters.text.componentInputParameter", "typo", InvalidSpecError, "inputs.parameters['text']"),
        (f"{TASK}.inputs.parameters.text.parameterExpressionSelector", "x[0]", UnsupportedSpecError, "parameterExpressionSelector"),
        (f"{TASK}.inputs.parameters.text", {"taskOutputParameter": {"producerTask": "step-2", "outputParameterKey": "result"}}, InvalidSpecError, "wait for each other: step, step-2"),
        (f"{TASK}.inputs.parameters.text", {"taskOutputParameter": {"producerTask": "step-9", "outputParameterKey": "result"}}, InvalidSpecError, "did you mean 'step-2'?"),
        ("root.dag.tasks.step-2.inputs.parameters.text.taskOutputParameter.outputParameterKey", "results", InvalidSpecError, "did you mean 'result'?"),
        (f"{TASK}.inputs", {}, InvalidSpecError, "required inputs are missing: text"),
        (f"{EXECUTOR}", {"resolver": {}}, UnsupportedSpecError, "executors['exec-step'].resolver"),
        (f"{EXECUTOR}", {"customJob": {}}, UnsupportedSpecError, "executors['exec-step'].custom_job"),
        (f"{EXECUTOR}.container.lifecycle", {"preCacheCheck": {"command": ["x"]}}, UnsupportedSpecError, "container.lifecycle"),
        (f"{EXECUTOR}.container.resources", {"resourceMemoryRequest": "1G"}, UnsupportedSpecError, "container.resources.resourceMemoryRequest"),
        (f"{EXECUTOR}.container.image", "{{$.inputs.parameters['text']}}", UnsupportedSpecError, "known only at run time"),
        (f"{EXECUTOR}.container.image", "", InvalidSpecError, "container.image: is empty"),
        (f"{INPUT}.parameterType", "TASK_CONFIG", UnsupportedSpecError, "parameters['text'].parameterType: TASK_CONFIG"),
        (f"{INPUT}.type", "STRING", UnsupportedSpecError, "parameters['text'].type"),
        ("components.comp-step.singlePlatformSpecs", [{"platform": "kubernetes"}], UnsupportedSpecError, "components['comp-step'].singlePlatformSpecs"),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_run_is_refused_by_its_path(
    spec: dict[str, Any], field: str, value: Any, error: type[SpecError], message: str
) -> None:
    changed = copy.deepcopy(spec)
    *parents, last = field.split(".")
    target = changed
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    load_pipeline(spec)
    with pytest.raises(error) as refused:
        load_pipeline(changed)
    assert message in str(refused.value)
    assert str(refused.value).startswith("pipelineSpec")


def test_a_component_that_contains_itself_is_refused(spec: dict[str, Any]) -> None:
    spec["components"]["comp-loop"] = {"dag": {"tasks": {"again": {"componentRef": {"name": "comp-loop"}}}}}
    spec["root"]["dag"]["tasks"]["again"] = {"componentRef": {"name": "comp-loop"}}
    with pytest.raises(UnsupportedSpecError, match="contains itself"):
        load_pipeline(spec)


def test_a_retry_of_a_whole_dag_is_refused(compile_pipeline: Compile) -> None:
    @dsl.pipeline
    def inner():
        step(text="a")

    @dsl.pipeline(name="outer")
    def outer():
        inner().set_retry(2)

    with pytest.raises(UnsupportedSpecError, match=r"tasks\['inner'\]\.retryPolicy"):
        load_pipeline(compile_pipeline(outer))


def test_a_value_that_the_compiler_dropped_on_its_way_into_nested_loops_is_refused(
    compile_pipeline: Compile,
) -> None:
    @dsl.pipeline(name="loops")
    def pipeline(text: str):
        outer = items()
        with dsl.ParallelFor(outer.output) as item:
            step(text=item.a)
            with dsl.ParallelFor(["x", "y"]) as inner:
                step(text=f"{inner}{item.b}")

    with pytest.raises(InvalidSpecError, match=r"no value reaches the component input .*-subvar-b"):
        load_pipeline(compile_pipeline(pipeline))


def test_only_the_task_of_an_exit_handler_is_an_exit_task(compile_pipeline: Compile) -> None:
    @dsl.component(base_image="python:3.11")
    def count(value: int = 1) -> int:
        return value

    @dsl.pipeline(name="guarded")
    def pipeline():
        with dsl.ExitHandler(step(text="exit")):
            failing = count()
            count(value=failing.output).ignore_upstream_failure()
            count(value=2).after(failing).ignore_upstream_failure()

    root = load_pipeline(compile_pipeline(pipeline)).root.implementation
    inside = root.tasks["exit-handler-1"].component.implementation
    tasks = {**root.tasks, **inside.tasks}
    assert [name for name, task in tasks.items() if task.is_exit_task] == ["step"]
    assert sorted(name for name, task in tasks.items() if not task.needs_success) == [
        "count-2",
        "count-3",
        "step",
    ]
