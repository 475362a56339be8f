"""checkpoints list, show, verify, gc, export: what a run has saved, on gs:// and on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock_pipelines.errors import InputError, PenstockError
from penstock_pipelines.verbs.options import at_least_0, state_option
from penstock_pipelines.verbs.processes import child, interrupt_on_signals, reenter_with

if TYPE_CHECKING:
    from penstock_trainer.checkpoint_root import CheckpointRoot

_LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""
_HOUR = 3600.0

_root_argument = click.argument("root", metavar="ROOT|RUN")
_step_option = click.option("--step", type=click.IntRange(min=0), help="Default: the newest.")
_json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group()
def checkpoints() -> None:
    """Checkpoints of a run.

    ROOT is the directory of the step directories: gs://.../checkpoints, file:///..., or a path. RUN is the id of a run, whose
    checkpoints are looked for below the pipeline root of penstock.toml. gs:// is the stand-in's where --state is one, else
    Cloud Storage.
    """


@checkpoints.command("list")
@_root_argument
@_json_option
@state_option
@click.pass_obj
def list_(settings_file: Path | None, root: str, as_json: bool, state: Path) -> None:
    """Steps, and which of them are whole.

    As storage describes the objects, without reading them: in a bucket by generation, size and crc32c, on disk by time and
    size. `verify` reads them.
    """
    opened = _open(root, settings_file, state)
    from penstock_pipelines.checkpoint_roots import storage_errors
    from penstock_pipelines.checkpoint_tables import print_states, states_json

    with storage_errors():
        states = [opened.state(step, checksums=False) for step in opened.steps()]
    if as_json:
        _print_json(states_json(opened, states))
    else:
        print_states(opened, states)


@checkpoints.command()
@_root_argument
@_step_option
@click.option("--against", metavar="ROOT[@STEP]", help="Show what differs from another checkpoint instead.")
@_json_option
@state_option
@click.pass_obj
def show(
    settings_file: Path | None, root: str, step: int | None, against: str | None, as_json: bool, state: Path
) -> None:
    """One checkpoint: manifest, config and tensors; or how it differs from another."""
    opened = _open(root, settings_file, state)
    from penstock_pipelines import checkpoint_tables as tables
    from penstock_pipelines.checkpoint_roots import chosen_manifest, open_root, storage_errors
    from penstock_trainer.checkpoint_root import read_index
    from penstock_trainer.contract.checkpoint import step_dir_uri
    from penstock_trainer.contract.fields import ContractError

    manifest = chosen_manifest(opened, step)
    if against is not None:
        other_root, other_step = _split_step(against)
        other = open_root(other_root, settings_file)
        there = chosen_manifest(other, other_step)
        told = tables.differences(manifest, there)
        names = (step_dir_uri(opened.uri, manifest.step), step_dir_uri(other.uri, there.step))
        if as_json:
            _print_json({name: list(values) for name, values in told.items()})
        else:
            tables.print_differences(told, *names)
        return
    with storage_errors():
        try:
            tensors = read_index(opened.storage, step_dir_uri(opened.uri, manifest.step), manifest)
        except ContractError as exc:
            raise PenstockError(str(exc)) from exc
    if as_json:
        _print_json(tables.checkpoint_json(opened, manifest, tensors))
    else:
        tables.print_checkpoint(opened, manifest, tensors)


@checkpoints.command()
@_root_argument
@_step_option
@click.option("--all", "all_steps", is_flag=True, help="Every step that was saved to its end.")
@state_option
@click.pass_obj
def verify(settings_file: Path | None, root: str, step: int | None, all_steps: bool, state: Path) -> None:
    """Read every byte and compare it with the manifest: size, crc32c, sha256, and what the index says.

    Ends with 0 when all is as it was written and 1 when it is not.
    """
    if all_steps and step is not None:
        raise click.UsageError("give --step or --all, not both.")
    opened = _open(root, settings_file, state)
    from penstock_pipelines.checkpoint_roots import require_step, storage_errors
    from penstock_trainer.contract.checkpoint import step_dir_uri

    with storage_errors():
        if step is not None:
            require_step(opened, step)
        committed = [each for each in opened.steps() if _has_manifest(opened, each)]
        due = committed if all_steps else [step] if step is not None else committed[:1]
        if not due:
            raise PenstockError(
                f"no step below {opened.uri} was saved to its end; there is nothing to verify."
            )
        are_good = [_verify_step(opened, each) for each in due]
    for left in sorted(set(opened.steps()) - set(committed)):
        if all_steps:
            click.echo(f"{step_dir_uri(opened.uri, left)}: not committed, left out")
    sys.exit(0 if all(are_good) else 1)


@checkpoints.command()
@_root_argument
@click.option("--delete/--dry-run", default=False, help="Default: --dry-run, which deletes nothing.")
@click.option(
    "--older-than",
    "hours",
    type=at_least_0,
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="What is younger stays: a save may be going on.",
)
@click.option(
    "--finished",
    is_flag=True,
    help="The run is over: what its last attempt has left goes too. Without it, nothing of the attempt that owner.json "
    "names is touched.",
)
@state_option
@click.pass_obj
def gc(
    settings_file: Path | None, root: str, delete: bool, hours: float, finished: bool, state: Path
) -> None:
    """Leftovers of saves that were cut off: what no manifest names.

    Never touched: what a manifest names, anything of a step whose manifest cannot be read, and files that are not of the
    checkpoint layout.
    """
    opened = _open(root, settings_file, state)
    from penstock_pipelines.checkpoint_roots import storage_errors
    from penstock_pipelines.checkpoint_tables import kept_lines, print_leftovers, told_bytes
    from penstock_trainer.checkpoint_root import find_leftovers, remove_leftovers

    with storage_errors():
        found = find_leftovers(opened, min_age_seconds=hours * _HOUR, is_finished=finished)
        due = [one for one in found if not one.kept]
        if delete:
            due = remove_leftovers(opened, due)
    print_leftovers(opened, due, verb="deleted" if delete else "garbage", now=time.time())
    for line in kept_lines(opened, found):
        click.echo(line)
    if not found:
        click.echo(f"{opened.uri}: nothing is left over")
        return
    size = told_bytes(sum(one.size for one in due))
    did = f"deleted {len(due)}, {size}" if delete else f"{len(due)} to delete, {size}"
    hint = "; delete with --delete" if due and not delete else ""
    click.echo(f"{opened.uri}: {did}; {sum(1 for one in found if one.kept)} kept{hint}")


@checkpoints.command()
@_root_argument
@_step_option
@click.option("--to", "target", required=True, metavar="DIR|URI", help="Directory of the exported model.")
@click.option(
    "--data",
    metavar="URI",
    help="Where the dataset with the tokenizer lies now. Default: where the run read it.",
)
@click.option("--replace", is_flag=True, help="Replace an export that stands there.")
@state_option
@click.pass_obj
def export(
    settings_file: Path | None,
    root: str,
    step: int | None,
    target: str,
    data: str | None,
    replace: bool,
    state: Path,
) -> None:
    """Write the model of a checkpoint as the trainer does at its end: safetensors, Hugging Face config, tokenizer."""
    interrupt_on_signals()
    opened = _open(root, settings_file, state, also=[target, data or ""])
    from penstock_pipelines.checkpoint_roots import chosen_manifest, root_uri, storage_errors

    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "an export needs torch, which is not installed here: pip install 'penstock[trainer]'."
        )
    manifest = chosen_manifest(opened, step)
    with storage_errors():
        problems = opened.state(manifest.step).findings
    if problems:
        raise PenstockError("the checkpoint is damaged: " + "; ".join(map(str, problems)))
    target_uri = root_uri(target if "://" in target else str(Path(target).absolute()), settings_file)
    arguments = [f"--root={opened.uri}", f"--step={manifest.step}", f"--to={target_uri}"]
    if data:
        arguments.append(
            f"--data={root_uri(data if '://' in data else str(Path(data).absolute()), settings_file)}"
        )
    arguments += ["--replace"] if replace else []
    code = child(["-m", "penstock_trainer.export_checkpoint", *arguments], os.environ)
    if code == 0:
        click.echo(f"exported step {manifest.step} of {opened.uri} to {target_uri}")
    sys.exit(code)


def _open(
    root: str, settings_file: Path | None, state: Path, *, also: list[str] | None = None
) -> CheckpointRoot:
    """The root; in the stand-in's environment if `state` is one and something of what was given may be its."""
    from penstock_pipelines.checkpoint_roots import open_root, uri_of

    given = [uri_of(root) or "gs://", *(also or [])]
    if any(uri.startswith("gs://") for uri in given):
        reenter_with(state, settings_file)
    return open_root(root, settings_file)


def _has_manifest(root: CheckpointRoot, step: int) -> bool:
    from penstock_trainer.contract.checkpoint import manifest_uri

    return root.storage.stat(manifest_uri(root.uri, step)) is not None


def _verify_step(root: CheckpointRoot, step: int) -> bool:
    """Print what is wrong with the step, or that nothing is."""
    from penstock_trainer.checkpoint_root import verify as verify_step
    from penstock_trainer.contract.checkpoint import step_dir_uri
    from penstock_trainer.contract.fields import ContractError
    from penstock_trainer.storage import ObjectCorruptError, ObjectNotFoundError

    count = total = 0
    with contextlib.suppress(ObjectNotFoundError, ObjectCorruptError, ContractError):  # told below
        manifest = root.manifest(step)
        count, total = len(manifest.objects), manifest.size
    findings = verify_step(root, step, on_bytes=_progress(f"step {step}", total))
    for finding in findings:
        click.echo(f"BAD {finding}")
    if not findings:
        click.echo(f"ok  {step_dir_uri(root.uri, step)}: {count} objects, {total:,} bytes read")
    return not findings


def _progress(what: str, total: int) -> Callable[[int], None]:
    """Counts bytes and tells them on stderr: in place on a terminal, else a line every few seconds."""
    from penstock_pipelines.checkpoint_tables import told_bytes

    lock, on_terminal = threading.Lock(), sys.stderr.isatty()
    done, told_at = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told_at
        with lock:
            done += count
            if not on_terminal and time.monotonic() - told_at < _LINE_SECONDS:
                return
            told_at = time.monotonic()
            line = f"{what}: {told_bytes(done)} of {told_bytes(total)}"
            ending = "\r" if done < total else "\n"
            sys.stderr.write(f"\r{line}  {ending}" if on_terminal else f"{line}\n")
            sys.stderr.flush()

    return advance


def _split_step(given: str) -> tuple[str, int | None]:
    """(root, step) of ROOT@STEP."""
    root, at, step = given.rpartition("@")
    return (root, int(step)) if at and step.isdigit() else (given, None)


def _print_json(told: Any) -> None:
    click.echo(json.dumps(told, indent=1))
