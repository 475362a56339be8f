"""What a run came to: tasks, losses, scores, verdict, registered model, reducers, report, goodput."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock_components.jobs.messages import CustomJob, CustomJobSpec
from penstock_components.jobs.program import strategy_of
from penstock_components.jobs.reader import read
from penstock_components.jobs.reducer_sizing import POOL_INDEX, sizing
from penstock_components.jobs.reduction_server import advice
from penstock_pipelines.follow import FINAL_STATES, Follower, failed_replica
from penstock_pipelines.goodput import print_goodput
from penstock_trainer.storage import StorageError, storage_for


def print_summary(console: Console, follower: Follower, *, report_dir: Path) -> None:
    """Print what there is of a run. What it does not have is left out; why it failed comes last."""
    view = follower.view
    console.print(f"\nrun {view.run_id}: {view.state.lower()}", style="bold", highlight=False)
    tasks = Table("task", "state", "seconds")
    for task in view.tasks.values():
        tasks.add_row(task.name, task.state.lower(), f"{task.seconds:.1f}")
    console.print(tasks)
    facts = Table.grid(padding=(0, 2))
    custom_job = follower.custom_job()
    spec = _spec_of(custom_job) if custom_job is not None else CustomJobSpec()
    for name, value in _facts(follower, custom_job, spec, report_dir):
        facts.add_row(name, value)
    console.print(facts)
    print_goodput(console, spec, is_over=view.state in FINAL_STATES)
    if view.state == "FAILED":
        _print_failure(console, follower, custom_job)


def _facts(
    follower: Follower, custom_job: Any | None, spec: CustomJobSpec, report_dir: Path
) -> Iterator[tuple[str, str]]:
    first, last = follower.view.first_step, follower.view.last_step
    if first is not None and last is not None:
        yield (
            "loss",
            f"{first.told_loss(4)} at step {first.step}, {last.told_loss(4)} at step {last.step} (nats per token)",
        )
    scores = follower.outputs("evaluate")
    if scores:
        yield "evaluation", _evaluation(scores["metrics"])
    verdict = follower.outputs("gate")
    if verdict:
        yield "gate", _verdict(verdict)
    registered = follower.outputs("register-model")
    if registered:
        yield "registered", f"{registered['resource_name']}  aliases {registered['aliases']}"
    if custom_job is not None:
        yield from _reducers(follower, custom_job, spec)
    if scores:
        yield "report", _fetch_report(scores["report"]["uri"], report_dir / f"{follower.view.run_id}.html")


def _evaluation(metrics: dict[str, Any]) -> str:
    model, baseline = metrics.get("bits_per_byte"), metrics.get("unigram_bits_per_byte")
    if model is None or baseline is None:
        return "the model's loss is not a finite number"
    gain = 1 - model / baseline
    side = "below" if gain >= 0 else "above"
    text = f"{model:.4f} bits per byte, {abs(gain):.1%} {side} the unigram baseline's {baseline:.4f}"
    champion = metrics.get("champion_bits_per_byte")
    return text if champion is None else f"{text}; the champion has {champion:.4f}"


def _verdict(outputs: dict[str, Any]) -> str:
    decision = "promoted to champion" if outputs["promote"] else "not promoted"
    registered = "registered" if outputs["register"] else "not registered"
    return f"{registered}, {decision}: " + " ".join(outputs["verdict"]["reasons"])


def _spec_of(custom_job: Any) -> CustomJobSpec:
    told = type(custom_job).to_dict(custom_job, always_print_fields_with_no_presence=False)
    return read(CustomJob, told, case="snake").message.job_spec or CustomJobSpec()


def _reducers(follower: Follower, custom_job: Any, spec: CustomJobSpec) -> Iterator[tuple[str, str]]:
    """What the Reduction Server pool would bring at this size, and what its first replica says of itself."""
    if len(spec.worker_pool_specs) <= POOL_INDEX:
        return
    yield "reducers", _reducer_advice(spec)
    first_replica = f"workerpool{POOL_INDEX}-0"
    said = [line.text for line in follower.replica_lines(custom_job) if line.replica == first_replica]
    if said:
        yield "", f"{first_replica} says: {said[0]}"


def _reducer_advice(spec: CustomJobSpec) -> str:
    sized = sizing(spec.worker_pool_specs)
    told = [sized.told] if sized else []
    found = advice(
        spec.worker_pool_specs,
        strategy=strategy_of(spec),
        scheduling_strategy=spec.scheduling.strategy if spec.scheduling else "",
        location="",
    )
    return "; ".join(finding.reason.rstrip(".") for finding in found) or "; ".join(told)


def _fetch_report(uri: str, path: Path) -> str:
    """Copy the report to this machine, where a browser opens it."""
    try:
        storage_for(uri).download(uri, path)
    except StorageError as exc:
        return f"{uri} ({exc})"
    return str(path)


def _print_failure(console: Console, follower: Follower, custom_job: Any | None) -> None:
    """Why the run failed: the replica's own words where training did, else those of each failed task."""
    reason = failed_replica(custom_job) if custom_job is not None else ""
    for task in follower.view.tasks.values():
        if task.state == "FAILED":
            told = reason if reason and task.is_training else task.error
            console.print(f"\n{task.name} failed: {told}", style="red", markup=False, soft_wrap=True)
    if not follower.view.tasks:
        console.print(f"\n{follower.view.error}", style="red", markup=False, soft_wrap=True)
