"""What a person sees of a run: a live table on a terminal, a line a change elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock_pipelines.follow import RunView, TaskView
from penstock_trainer.contract.events import ProgressEvent, StepEvent

_STYLES = {
    "SUCCEEDED": "green",
    "SKIPPED": "cyan",
    "FAILED": "bold red",
    "CANCELLED": "yellow",
    "RUNNING": "bold",
}


class LiveDisplay:
    """One row a task with a bar for what tells its progress. A context manager."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, view: RunView) -> None:
        """Redraw the table."""
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for task in view.tasks.values():
            table.add_row(_mark(task), task.name, f"{task.seconds:5.1f} s", _bar(task), describe(task))
        self._live.update(table)


@dataclass
class LineDisplay:
    """A line when a task changes state, and when training has logged a step. A context manager."""

    console: Console
    _shown: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put back."""

    def update(self, view: RunView) -> None:
        """Print what is new."""
        for task in view.tasks.values():
            line = f"{task.name}: {task.state.lower()}"
            if isinstance(task.event, StepEvent) and task.state == "RUNNING":
                line = f"{task.name}: {describe(task)}"
            if self._shown.get(task.name) != line:
                self._shown[task.name] = line
                self.console.print(line, highlight=False, soft_wrap=True)


def display_for(console: Console) -> LiveDisplay | LineDisplay:
    """The display that suits where the output goes."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def describe(task: TaskView) -> str:
    """The newest progress of a task in words."""
    event = task.event
    if isinstance(event, StepEvent):
        held_out = f"  held-out loss {task.evaluation.loss:.3f}" if task.evaluation else ""
        told = f"loss {event.told_loss(3)}{held_out}  {event.tokens_per_second:,.0f} tokens/s"
        return f"step {event.step}/{event.steps}  {told}"
    if isinstance(event, ProgressEvent) and task.state == "RUNNING":
        return f"{event.done:,.0f}/{event.total:,.0f} {event.unit}"
    return ""


def _mark(task: TaskView) -> Spinner | Text:
    if task.state == "RUNNING":
        return Spinner("dots")
    return Text(task.state.lower(), style=_STYLES.get(task.state, "dim"))


def _bar(task: TaskView) -> ProgressBar | Text:
    event = task.event
    if isinstance(event, StepEvent):
        return ProgressBar(total=event.steps, completed=event.step, width=24)
    if isinstance(event, ProgressEvent) and task.state == "RUNNING":
        return ProgressBar(total=event.total, completed=event.done, width=24)
    return Text("")
