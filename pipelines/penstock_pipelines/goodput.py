"""Where the wall time of a run's training went, from the records that its attempts left in storage."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from penstock_components.jobs.messages import CustomJobSpec
from penstock_trainer.contract.config import parse_args
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.contract.goodput import (
    Goodput,
    goodput_dir_uri,
    join_attempts,
    readable_records,
    told_seconds,
)
from penstock_trainer.storage import Storage, StorageError, join, storage_for

_NO_OVERLAP_SECONDS = 1.0
"""The start of a process is known to 10 ms, and clocks that are kept in step differ by as much."""


def print_goodput(
    console: Console, spec: CustomJobSpec, *, is_over: bool, storage: Storage | None = None
) -> None:
    """A table of a training job's goodput; nothing for a job without records, such as one of another program.

    With `is_over` no attempt of the job is at work any more. Blocks on storage.
    """
    root_uri = checkpoint_root_uri(spec)
    if not root_uri:
        return
    try:
        found = read_goodput(root_uri, is_over=is_over, storage=storage)
    except StorageError as exc:
        console.print(f"\ngoodput: not known: {exc}", highlight=False, markup=False, soft_wrap=True)
        return
    if found is not None:
        print_table(console, found)


def checkpoint_root_uri(spec: CustomJobSpec) -> str:
    """Where our trainer keeps a job's checkpoints, by the job's own arguments; "" for any other program."""
    container = spec.worker_pool_specs[0].container_spec if spec.worker_pool_specs else None
    if container is None or "penstock_trainer" not in container.command:
        return ""
    output = spec.base_output_directory
    checkpoint_dir = join(output.output_uri_prefix, "checkpoints") if output else ""
    try:
        return parse_args(container.args).checkpoint.root_uri(checkpoint_dir)
    except ContractError:  # of a foreign script under `launch`, or of another version
        return ""


def read_goodput(root_uri: str, *, is_over: bool, storage: Storage | None = None) -> Goodput | None:
    """Of all attempts below a checkpoint root; None where none has left a record. Raises StorageError."""
    storage = storage or storage_for(root_uri)
    found = storage.list_objects(f"{goodput_dir_uri(root_uri)}/")
    records = readable_records({info.uri: storage.read(info.uri) for info in found})
    return join_attempts(records, is_over=is_over) if records else None


def print_table(console: Console, goodput: Goodput) -> None:
    """The parts of the time, the goodput, and what follows for the interval between checkpoints."""
    table = Table("training", "time", "share")
    total = goodput.total_seconds
    for name, seconds in goodput.parts():
        if seconds:
            table.add_row(name, told_seconds(seconds), f"{seconds / total:.1%}")
    console.print(table)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("goodput", f"{goodput.share:.1%} of {told_seconds(total)}")
    facts.add_row("interruptions", goodput.told_interruptions())
    facts.add_row("checkpoint interval", goodput.told_interval())
    options = plan_options(goodput)
    if options:
        facts.add_row("to plan with", options)
    if goodput.overlap_seconds > _NO_OVERLAP_SECONDS:
        told = told_seconds(goodput.overlap_seconds)
        facts.add_row("note", f"{told} are told by two attempts at once: see docs/goodput.md")
    console.print(facts)


def plan_options(goodput: Goodput) -> str:
    """What `penstock plan` takes of this run; "" while no interruption was seen, as then no rate is known."""
    stall = goodput.saves.mean_stall_seconds
    if goodput.mtbf_seconds is None or goodput.restart_seconds is None or stall is None:
        return ""
    hours = goodput.mtbf_seconds * goodput.num_nodes / 3600
    return (
        f"--node-mtbf-hours {hours:.3g} --restart-seconds {goodput.restart_seconds:.3g} "
        f"--save-stall-seconds {stall:.3g}"
    )
