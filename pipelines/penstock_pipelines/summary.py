"""What a run came to: tasks, losses, scores, verdict, registered model, reducers, report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock_components.jobs.pools import JobSpecError, Machine
from penstock_components.jobs.reduction_server import POOL_INDEX, ReductionServer, advice
from penstock_components.machines.catalogue import MachineError
from penstock_pipelines.follow import Follower, failed_replica
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
    for name, value in _facts(follower, custom_job, report_dir):
        facts.add_row(name, value)
    console.print(facts)
    if view.state == "FAILED":
        _print_failure(console, follower, custom_job)


def _facts(follower: Follower, custom_job: Any | None, report_dir: Path) -> Iterator[tuple[str, str]]:
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
        yield from _reducers(follower, custom_job)
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


def _reducers(follower: Follower, custom_job: Any) -> Iterator[tuple[str, str]]:
    """What the Reduction Server pool would bring at this size, and what its first replica says of itself."""
    pools = custom_job.job_spec.worker_pool_specs
    if len(pools) <= POOL_INDEX:
        return
    yield "reducers", _reducer_advice(pools)
    first_replica = f"workerpool{POOL_INDEX}-0"
    said = [line.text for line in follower.replica_lines(custom_job) if line.replica == first_replica]
    if said:
        yield "", f"{first_replica} says: {said[0]}"


def _reducer_advice(pools: Any) -> str:
    node, reducers = pools[0].machine_spec, pools[POOL_INDEX]
    try:
        machine = Machine(
            machine_type=node.machine_type,
            accelerator_type=node.accelerator_type.name if node.accelerator_count else "",
            accelerator_count=node.accelerator_count,
        )
        server = ReductionServer(
            replica_count=reducers.replica_count, machine_type=reducers.machine_spec.machine_type
        )
        num_nodes = sum(pool.replica_count for pool in pools[:POOL_INDEX])
        return advice(server, machine=machine, num_nodes=num_nodes)
    except (JobSpecError, MachineError) as exc:  # machines newer than the catalogue
        return f"what they bring is not known: {exc}"


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
