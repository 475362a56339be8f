"""What a person sees of a run."""

from __future__ import annotations

import io

from rich.console import Console

from penstock_pipelines.display import LineDisplay, LiveDisplay, describe, display_for
from penstock_pipelines.follow import RunView, TaskView
from penstock_trainer.contract.events import EvaluationEvent, ProgressEvent, StepEvent


def view(*tasks: TaskView) -> RunView:
    return RunView("run", tasks={task.name: task for task in tasks})


def step(number: int) -> StepEvent:
    return StepEvent(
        step=number, steps=10, loss=5.0, learning_rate=0.1, grad_norm=1.0, tokens_per_second=1234.0
    )


def test_a_log_gets_a_line_a_change() -> None:
    output = io.StringIO()
    display = LineDisplay(Console(file=output))
    task = TaskView("train", state="RUNNING")
    for state, event in [
        ("RUNNING", None),
        ("RUNNING", step(1)),
        ("RUNNING", step(1)),
        ("SUCCEEDED", step(10)),
    ]:
        task.state, task.event = state, event
        display.update(view(task))
    assert output.getvalue().splitlines() == [
        "train: running",
        "train: step 1/10  loss 5.000  1,234 tokens/s",
        "train: succeeded",
    ]


def test_the_newest_score_stands_beside_the_loss() -> None:
    task = TaskView("train", state="RUNNING", event=step(7))
    task.evaluation = EvaluationEvent(step=5, loss=5.25, accuracy=0.1, targets=9, best=True, seconds=1.0)
    assert describe(task) == "step 7/10  loss 5.000  held-out loss 5.250  1,234 tokens/s"


def test_a_terminal_gets_a_row_and_a_bar_a_task() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    staging = TaskView("stage-data", "1", "RUNNING", 2.0, "", ProgressEvent(done=3, total=4, unit="MB"))
    training = TaskView("train", "2", "RUNNING", 3.0, "", step(5))
    with LiveDisplay(console) as display:
        display.update(view(staging, training))
    text = output.getvalue()
    assert "3/4 MB" in text
    assert "step 5/10" in text
    assert "━" in text


def test_the_display_suits_where_the_output_goes() -> None:
    assert isinstance(display_for(Console(file=io.StringIO())), LineDisplay)
    assert isinstance(display_for(Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)


def test_training_is_known_by_the_name_of_gcpcs_component() -> None:
    assert TaskView("custom-training-job-2", "1").is_training
    assert not TaskView("evaluate", "1").is_training
