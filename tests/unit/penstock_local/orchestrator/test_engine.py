"""Control flow: what runs, in which order, and how it ends."""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl  # only tests use kfp

from penstock_local.orchestrator.engine import FailurePolicy
from penstock_local.orchestrator.executor import TaskExit, TaskLaunch
from penstock_local.orchestrator.state import TaskState

Compile = Callable[[Any], dict[str, Any]]

component = functools.partial(dsl.component, base_image="python:3.11")


@component
def word(text: str) -> str:
    return text


@component
def number(value: int = 1) -> int:
    return value


@component
def make(text: str, data: dsl.Output[dsl.Dataset]):
    pass


@component
def read(data: dsl.Input[dsl.Dataset]) -> str:
    return data.uri


@component
def read_all(data: dsl.Input[list[dsl.Dataset]]) -> int:
    return len(data)


@component
def join(texts: list[str]) -> str:
    return "".join(texts)


@component
def report(status: dsl.PipelineTaskFinalStatus, note: str = "note"):
    pass


def test_independent_tasks_overlap(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="parallel")
    def pipeline():
        for text in ("a", "b", "c"):
            word(text=text)

    barrier = threading.Barrier(3)

    def body(launch: TaskLaunch, cancelled: threading.Event) -> dict[str, str]:
        barrier.wait(timeout=20)
        return {"Output": launch.task_name}

    outcome = harness.run(compile_pipeline(pipeline), {"word": body, "word-2": body, "word-3": body})
    assert outcome.state is TaskState.SUCCEEDED


def test_outputs_flow_through_nested_dags(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline
    def inner(text: str, data: dsl.Input[dsl.Dataset]) -> str:
        read(data=data)
        return word(text=f"<{text}>").output

    @dsl.pipeline(name="nested")
    def pipeline(text: str) -> str:
        made = make(text=text)
        once = inner(text=text, data=made.outputs["data"])
        return word(text=once.output).output

    outcome = harness.run(
        compile_pipeline(pipeline), {"word": lambda launch, _: {"Output": "X"}}, parameters={"text": "hello"}
    )
    assert outcome.outputs.parameters == {"Output": "X"}
    launches = [launch for launch in harness.executor.launches if launch.task_name == "word"]
    values = [launch.executor_input["inputs"]["parameterValues"]["text"] for launch in launches]
    assert values == ["<hello>", "X"]
    [artifact] = harness.executor.launch_of("read").executor_input["inputs"]["artifacts"]["data"]["artifacts"]
    task = harness.recorder.task("make")
    assert artifact["uri"] == f"gs://bkt/runs/123/demo-1/make_{task.task_id}/data"
    assert artifact["type"]["schemaTitle"] == "system.Dataset"
    assert harness.recorder.task("read").parent_task_id == harness.recorder.task("inner").task_id


@pytest.mark.parametrize(("value", "chosen"), [(3, "word"), (9, "word-2"), (0, "word-3")])
def test_one_branch_runs_and_one_of_takes_its_output(
    harness: Any, compile_pipeline: Compile, value: int, chosen: str
) -> None:
    @dsl.pipeline(name="branches")
    def pipeline(value: int):
        decided = number(value=value)
        with dsl.If(decided.output == 3):
            first = word(text="three")
        with dsl.Elif(decided.output > 5):
            second = word(text="many")
        with dsl.Else():
            third = word(text="few")
        word(text=dsl.OneOf(first.output, second.output, third.output))

    outcome = harness.run(
        compile_pipeline(pipeline),
        {"number": lambda *_: {"Output": value}},
        parameters={"value": value},
    )
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    assert harness.executor.parameters_of("word-4")["text"] == chosen
    branches = [harness.recorder.final()[f"condition-{index}"] for index in (2, 3, 4)]
    assert sorted(branches) == ["NOT_TRIGGERED", "NOT_TRIGGERED", "SUCCEEDED"]


def test_one_of_takes_the_artifact_of_the_branch_that_ran(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="branches")
    def pipeline(fast: bool):
        with dsl.If(fast == True):  # noqa: E712  # recorded by kfp, not evaluated
            first = make(text="1")
        with dsl.Else():
            second = make(text="2")
        read(data=dsl.OneOf(first.outputs["data"], second.outputs["data"]))

    assert harness.run(compile_pipeline(pipeline), parameters={"fast": False}).state is TaskState.SUCCEEDED
    [artifact] = harness.executor.launch_of("read").executor_input["inputs"]["artifacts"]["data"]["artifacts"]
    assert "/make-2_" in artifact["uri"]


def test_what_follows_a_branch_that_did_not_run_does_not_run(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="branch")
    def pipeline(text: str):
        with dsl.If(text == "yes"):
            inside = word(text="a")
            word(text=inside.output)

    assert harness.run(compile_pipeline(pipeline), parameters={"text": "no"}).state is TaskState.SUCCEEDED
    assert harness.executor.launches == []
    assert harness.recorder.final() == {"condition-1": "NOT_TRIGGERED"}


def exit_handler_pipeline() -> Any:
    @dsl.pipeline(name="guarded")
    def pipeline(text: str = "note"):
        with dsl.ExitHandler(report(note=text), name="guard"):
            first = word(text="a")
            word(text=first.output)

    return pipeline


@pytest.mark.parametrize("policy", list(FailurePolicy))
def test_an_exit_task_runs_after_a_failure_and_is_told_of_it(
    harness: Any, compile_pipeline: Compile, policy: FailurePolicy
) -> None:
    spec = compile_pipeline(exit_handler_pipeline())
    outcome = harness.run(spec, {"word": lambda *_: TaskExit(3, "no disk")}, failure_policy=policy)
    assert outcome.state is TaskState.FAILED
    status = harness.executor.parameters_of("report")["status"]
    assert status["state"] == "FAILED"
    assert status["pipelineTaskName"] == "exit-handler-1"
    assert status["pipelineJobResourceName"] == harness.context.resource_name
    assert status["error"]["code"] == 9
    assert "The failed tasks are: [word]" in status["error"]["message"]
    assert "exited with code 3: no disk" in status["error"]["message"]
    assert harness.recorder.final() == {
        "exit-handler-1": "FAILED",
        "word": "FAILED",
        "word-2": "NOT_TRIGGERED",
        "report": "SUCCEEDED",
    }


def test_a_failure_leaves_groups_that_were_not_opened_yet_alone(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="guarded-branch")
    def pipeline():
        with dsl.ExitHandler(report(), name="guard"):
            first = word(text="a")
            second = word(text=first.output)
            with dsl.If(second.output == "a", name="branch"):
                word(text="c")

    outcome = harness.run(compile_pipeline(pipeline), {"word": lambda *_: TaskExit(1)})
    assert outcome.state is TaskState.FAILED
    assert harness.recorder.final() == {
        "exit-handler-1": "FAILED",
        "word": "FAILED",
        "word-2": "NOT_TRIGGERED",
        "condition-2": "NOT_TRIGGERED",
        "report": "SUCCEEDED",
    }


def test_an_exit_task_is_told_of_success(harness: Any, compile_pipeline: Compile) -> None:
    assert harness.run(compile_pipeline(exit_handler_pipeline())).state is TaskState.SUCCEEDED
    status = harness.executor.parameters_of("report")["status"]
    assert status["state"] == "SUCCEEDED"
    assert "error" not in status


def until_cancelled(exit_code: int) -> Callable[[TaskLaunch, threading.Event], int]:
    def body(launch: TaskLaunch, cancelled: threading.Event) -> int:
        assert cancelled.wait(timeout=20)
        return exit_code

    return body


@pytest.mark.parametrize("exit_code", [0, 143])
def test_a_cancelled_task_is_cancelled_whatever_its_exit_code(
    harness: Any, compile_pipeline: Compile, exit_code: int
) -> None:
    spec = compile_pipeline(exit_handler_pipeline())
    outcome = harness.run_and_cancel(spec, {"word": until_cancelled(exit_code)}, when="word")
    assert outcome.state is TaskState.CANCELLED
    assert harness.executor.parameters_of("report")["status"]["state"] == "CANCELLED"
    assert harness.recorder.final() == {
        "exit-handler-1": "CANCELLED",
        "word": "CANCELLED",
        "word-2": "CANCELLED",
        "report": "SUCCEEDED",
    }
    states = harness.recorder.states["word"]
    assert states == [TaskState.PENDING, TaskState.RUNNING, TaskState.CANCELLING, TaskState.CANCELLED]


def test_a_shutdown_stops_exit_tasks_too(harness: Any, compile_pipeline: Compile) -> None:
    run = harness.start(compile_pipeline(exit_handler_pipeline()), {"report": until_cancelled(0)})
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(run.run()))
    thread.start()
    harness.recorder.wait_for("report", TaskState.RUNNING)
    run.cancel()
    run.cancel(exit_tasks_too=True)
    thread.join(timeout=20)
    assert outcomes[0].state is TaskState.CANCELLED
    assert harness.recorder.final()["report"] == "CANCELLED"
    assert harness.recorder.final()["exit-handler-1"] == "SUCCEEDED"


def test_a_run_cancelled_before_it_starts_runs_only_its_exit_task(
    harness: Any, compile_pipeline: Compile
) -> None:
    run = harness.start(compile_pipeline(exit_handler_pipeline()))
    run.cancel()
    assert run.run().state is TaskState.CANCELLED
    assert [launch.task_name for launch in harness.executor.launches] == ["report"]


def test_a_cancelled_run_does_not_wait_for_a_backoff(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="retry")
    def pipeline():
        word(text="a").set_retry(1, backoff_duration="600s")

    run = harness.start(compile_pipeline(pipeline), {"word": lambda *_: 1})
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(run.run()))
    thread.start()
    harness.recorder.wait_for("word", TaskState.RUNNING, attempts=1)
    while harness.recorder.task("word").attempts[0].end_time is None:
        time.sleep(0.01)
    run.cancel()
    thread.join(timeout=20)
    assert outcomes[0].state is TaskState.CANCELLED
    assert len(harness.executor.launches) == 1


def failing_pipeline() -> Any:
    @dsl.pipeline(name="policies")
    def pipeline():
        word(text="fails")
        slow = word(text="slow")
        word(text=slow.output)

    return pipeline


@pytest.mark.parametrize(
    ("policy", "after"), [(FailurePolicy.SLOW, "SUCCEEDED"), (FailurePolicy.FAST, "NOT_TRIGGERED")]
)
def test_failing_fast_starts_nothing_new_and_failing_slow_does(
    harness: Any, compile_pipeline: Compile, policy: FailurePolicy, after: str
) -> None:
    def slow(launch: TaskLaunch, cancelled: threading.Event) -> dict[str, str]:
        harness.recorder.wait_for("word", TaskState.FAILED)
        return {"Output": "done"}

    outcome = harness.run(
        compile_pipeline(failing_pipeline()), {"word": lambda *_: 1, "word-2": slow}, failure_policy=policy
    )
    assert outcome.state is TaskState.FAILED
    assert outcome.error is not None
    assert "[word]" in outcome.error.message
    assert harness.recorder.final() == {"word": "FAILED", "word-2": "SUCCEEDED", "word-3": after}


def test_ignore_upstream_failure_runs_with_the_default(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="ignore")
    def pipeline():
        failing = number(value=1)
        number(value=failing.output).ignore_upstream_failure()

    outcome = harness.run(
        compile_pipeline(pipeline), {"number": lambda *_: 1, "number-2": lambda *_: {"Output": 5}}
    )
    assert outcome.state is TaskState.FAILED
    assert harness.executor.parameters_of("number-2")["value"] == 1
    assert harness.recorder.final() == {"number": "FAILED", "number-2": "SUCCEEDED"}


def test_a_failed_attempt_is_repeated_in_the_same_folder_after_a_growing_pause(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="retry")
    def pipeline():
        word(text="a").set_retry(3, backoff_factor=3.0)

    starts: list[float] = []

    def body(launch: TaskLaunch, cancelled: threading.Event) -> Any:
        starts.append(time.monotonic())
        marker = launch.work_dir / "outputs" / "resources"
        marker.write_text((marker.read_text() if marker.exists() else "") + str(launch.attempt))
        return {"Output": marker.read_text()} if launch.attempt == 4 else TaskExit(1)

    spec = compile_pipeline(pipeline)
    # kfp writes whole seconds only.
    spec["root"]["dag"]["tasks"]["word"]["retryPolicy"] |= {
        "backoffDuration": "0.1s",
        "backoffMaxDuration": "0.2s",
    }
    outcome = harness.run(spec, {"word": body})
    assert outcome.state is TaskState.SUCCEEDED
    task = harness.recorder.task("word")
    assert [(attempt.number, attempt.exit_code) for attempt in task.attempts] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 0),
    ]
    assert task.outputs.parameters == {"Output": "1234"}
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert [pause >= floor for pause, floor in zip(pauses, (0.1, 0.2, 0.2), strict=True)] == [True] * 3


def test_a_task_fails_when_its_retries_are_used_up(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="retry")
    def pipeline():
        word(text="a").set_retry(2)

    assert harness.run(compile_pipeline(pipeline), {"word": lambda *_: 7}).state is TaskState.FAILED
    task = harness.recorder.task("word")
    assert len(task.attempts) == 3
    assert task.error is not None
    assert "exited with code 7" in task.error.message


def test_an_executor_that_raises_fails_the_task_as_an_internal_error(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="broken")
    def pipeline():
        word(text="a")

    def body(launch: TaskLaunch, cancelled: threading.Event) -> None:
        raise OSError("no such program")

    assert harness.run(compile_pipeline(pipeline), {"word": body}).state is TaskState.FAILED
    error = harness.recorder.task("word").error
    assert error.code == 13
    assert "no such program" in error.message


def test_a_defect_of_the_listener_ends_the_run_and_stops_its_tasks(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="broken")
    def pipeline():
        word(text="a")

    stopped = threading.Event()

    def body(launch: TaskLaunch, cancelled: threading.Event) -> int:
        stopped.set() if cancelled.wait(timeout=20) else None
        return 0

    run = harness.start(compile_pipeline(pipeline), {"word": body})

    def task_changed(task: Any) -> None:
        if task.state is TaskState.RUNNING and task.task_name == "word":
            raise RuntimeError("database is gone")

    harness.recorder.task_changed = task_changed
    with pytest.raises(RuntimeError, match="database is gone"):
        run.run()
    assert stopped.wait(timeout=20)


def test_a_second_run_takes_cached_outputs(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="cached")
    def pipeline(text: str):
        made = make(text=text)
        read(data=made.outputs["data"])
        word(text="always").set_caching_options(False)

    spec = compile_pipeline(pipeline)
    harness.run(spec, parameters={"text": "a"})
    first = harness.recorder.task("make")
    assert harness.run(spec, parameters={"text": "a"}).state is TaskState.SUCCEEDED
    assert harness.recorder.final() == {"make": "SKIPPED", "read": "SKIPPED", "word": "SUCCEEDED"}
    assert harness.recorder.task("make").outputs == first.outputs

    harness.run(spec, parameters={"text": "b"})
    assert harness.recorder.final() == {"make": "SUCCEEDED", "read": "SUCCEEDED", "word": "SUCCEEDED"}


def test_the_cache_does_not_keep_failures_or_other_pipelines(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="cached")
    def pipeline():
        word(text="a")

    spec = compile_pipeline(pipeline)
    harness.run(spec, {"word": lambda *_: 1})
    harness.run(spec)
    assert harness.recorder.final() == {"word": "SUCCEEDED"}
    harness.run({**spec, "pipelineInfo": {"name": "other"}})
    assert harness.recorder.final() == {"word": "SUCCEEDED"}


def test_a_loop_runs_as_many_iterations_at_once_as_allowed_and_collects_in_order(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="loop")
    def pipeline(texts: list[str]):
        with dsl.ParallelFor(texts, parallelism=2) as text:
            said = word(text=text)
            made = make(text=said.output)
        join(texts=dsl.Collected(said.output))
        read_all(data=dsl.Collected(made.outputs["data"]))

    lock, running, peak = threading.Lock(), 0, 0
    pair = threading.Barrier(2)

    def body(launch: TaskLaunch, cancelled: threading.Event) -> dict[str, str]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        pair.wait(timeout=20)
        time.sleep(0.1)  # time for a third iteration to start, if the limit did not hold
        with lock:
            running -= 1
        return {"Output": launch.executor_input["inputs"]["parameterValues"]["text"].upper()}

    bodies = {"word": body, "read-all": lambda *_: {"Output": 4}}
    outcome = harness.run(compile_pipeline(pipeline), bodies, parameters={"texts": ["a", "b", "c", "d"]})
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    assert peak == 2
    assert harness.executor.parameters_of("join")["texts"] == ["A", "B", "C", "D"]
    artifacts = harness.executor.launch_of("read-all").executor_input["inputs"]["artifacts"]["data"][
        "artifacts"
    ]
    assert len({artifact["uri"] for artifact in artifacts}) == 4
    iterations = [name for name in harness.recorder.final() if name.startswith("for-loop")]
    assert sorted(iterations) == ["for-loop-1", *(f"for-loop-1-{index}" for index in range(4))]


def test_loops_nest_and_select_entries_of_items(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="loops")
    def pipeline():
        with dsl.ParallelFor([{"key": "x", "size": "1"}, {"key": "y", "size": "2"}]) as item:
            word(text=item.key)
            word(text=item.size)
            with dsl.ParallelFor(["p", "q"]) as inner, dsl.If(inner == "p"):
                word(text=f"{inner}!")

    outcome = harness.run(compile_pipeline(pipeline))
    assert outcome.state is TaskState.SUCCEEDED, outcome.error
    values = sorted(
        str(launch.executor_input["inputs"]["parameterValues"].get("text"))
        for launch in harness.executor.launches
        if launch.task_name.startswith("word")
    )
    assert values == ["1", "2", "p!", "p!", "x", "y"]


def test_a_loop_over_nothing_succeeds_and_collects_an_empty_list(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="loop")
    def pipeline(texts: list[str]):
        with dsl.ParallelFor(texts) as text:
            said = word(text=text)
        join(texts=dsl.Collected(said.output))

    assert harness.run(compile_pipeline(pipeline), parameters={"texts": []}).state is TaskState.SUCCEEDED
    assert harness.executor.parameters_of("join")["texts"] == []


def test_more_artifacts_than_a_task_may_have_fail_it_as_on_vertex(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="loop")
    def pipeline():
        with dsl.ParallelFor(list(range(101))) as index:
            made = make(text=f"{index}")
        read_all(data=dsl.Collected(made.outputs["data"]))

    assert harness.run(compile_pipeline(pipeline)).state is TaskState.FAILED
    message = harness.recorder.task("read-all").error.message
    assert message == "Maximum number of artifacts exceeded. Maximum allowed: 100, requested: 101"


def test_work_stays_inside_the_work_dir(harness: Any, compile_pipeline: Compile, tmp_path: Path) -> None:
    @dsl.pipeline(name="files")
    def pipeline():
        word(text="a")

    harness.run(compile_pipeline(pipeline))
    launch = harness.executor.launch_of("word")
    assert launch.work_dir.parent == tmp_path / "work"
    assert Path(launch.executor_input["outputs"]["outputFile"]).is_relative_to(launch.work_dir)


def test_a_loop_over_a_list_that_was_not_produced_fails(harness: Any, compile_pipeline: Compile) -> None:
    @component
    def names(count: int = 2) -> list[str]:
        return ["a"] * count

    @dsl.pipeline
    def inner() -> list[str]:
        return names().output

    @dsl.pipeline(name="loop")
    def pipeline():
        with dsl.ParallelFor(inner().output) as text:
            word(text=text)

    spec = compile_pipeline(pipeline)
    # As after `ignore_upstream_failure()` on a group, which kfp refuses to compile.
    spec["root"]["dag"]["tasks"]["for-loop-1"]["triggerPolicy"] = {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    harness.run(spec, {"names": lambda *_: 1})
    assert "has nothing to iterate" in harness.recorder.task("for-loop-1").error.message


def test_a_missing_upstream_output_fails_the_task_that_needs_it(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="missing")
    def pipeline():
        word(text=word(text="a").output)

    spec = compile_pipeline(pipeline)
    spec["root"]["dag"]["tasks"]["word-2"]["triggerPolicy"] = {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    harness.run(spec, {"word": lambda *_: 1})
    error = harness.recorder.task("word-2").error
    assert error.message == "the input parameter 'text' was not produced by task 'word' (output 'Output')"


def test_a_condition_that_cannot_be_decided_fails_its_task(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="undecided")
    def pipeline(text: str):
        with dsl.If(text == "yes"):
            word(text="a")

    spec = compile_pipeline(pipeline)
    spec["root"]["dag"]["tasks"]["condition-1"]["triggerPolicy"]["condition"] = (
        "inputs.parameter_values['pipelinechannel--text'] > 1"
    )
    assert harness.run(spec, parameters={"text": "no"}).state is TaskState.FAILED
    assert "cannot compare 'no' (str) > 1 (int)" in harness.recorder.task("condition-1").error.message


def test_pipeline_parameters_may_hold_placeholders_of_the_run(
    harness: Any, compile_pipeline: Compile
) -> None:
    @dsl.pipeline(name="defaults")
    def pipeline(where: str = "{{$.pipeline_root}}/x", when: str = "{{$.pipeline_job_create_time_utc}}"):
        word(text=where)
        word(text=f"{when} {dsl.PIPELINE_TASK_NAME_PLACEHOLDER}")

    harness.run(compile_pipeline(pipeline))
    assert harness.executor.parameters_of("word")["text"] == "gs://bkt/runs/x"
    assert harness.executor.parameters_of("word-2")["text"] == "2026-01-02T03:04:05Z word-2"


def test_an_unknown_placeholder_fails_the_task_and_is_named(harness: Any, compile_pipeline: Compile) -> None:
    @dsl.pipeline(name="typo")
    def pipeline():
        word(text="{{$.pipeline_typo}}")

    assert harness.run(compile_pipeline(pipeline)).state is TaskState.FAILED
    assert "{{$.pipeline_typo}} has no value here" in harness.recorder.task("word").error.message
    assert harness.executor.launches == []
