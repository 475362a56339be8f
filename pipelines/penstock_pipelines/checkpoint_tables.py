"""Checkpoints as text for people and as JSON types for programs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock_trainer.checkpoint_root import CheckpointRoot, IndexedTensor, Leftover, StepState
from penstock_trainer.contract.checkpoint import Manifest, step_dir_uri
from penstock_trainer.contract.fields import to_dict

_WIDTH_OF_A_FILE = 200
"""Columns where no terminal says how many there are."""


def console() -> Console:
    """For tables on stdout."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH_OF_A_FILE)


def told_bytes(size: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"


def told_time(seconds: float) -> str:
    """In UTC; `-` for what format 1 does not tell."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds else "-"


def print_states(root: CheckpointRoot, states: Sequence[StepState]) -> None:
    """A row a step, newest first, then what is wrong with which, then the total."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "saved at (UTC)", "size", "samples", "tokens", "written by", "attempt", "state"):
        table.add_column(name, justify="right" if name in ("step", "size", "samples", "tokens") else "left")
    for state in states:
        table.add_row(str(state.step), *_cells(state.manifest), state.condition)
    out = console()
    out.print(table)
    for state in states:
        for finding in state.findings:
            out.print(f"step {state.step}: {finding}", soft_wrap=True, highlight=False, markup=False)
    out.print(_total(root, states), soft_wrap=True, highlight=False, markup=False)


def states_json(root: CheckpointRoot, states: Sequence[StepState]) -> list[dict[str, Any]]:
    """A dict a step, newest first; what a manifest tells is null where there is none."""
    return [_state_json(root, state) for state in states]


def print_checkpoint(root: CheckpointRoot, manifest: Manifest, tensors: Sequence[IndexedTensor]) -> None:
    """Manifest, config, tensors and totals of one checkpoint."""
    out = console()
    out.print(f"step {manifest.step} of {root.uri}", soft_wrap=True, highlight=False, markup=False)
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts_of(manifest).items():
        facts.add_row(f"  {name}", value)
    out.print(facts, highlight=False)
    out.print("config")
    for name, value in leaves(manifest.config):
        out.print(f"  {name} = {value!r}", soft_wrap=True, highlight=False, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tensor", "shape", "dtype", "bytes", "chunks"):
        table.add_column(name, justify="right" if name in ("bytes", "chunks") else "left", overflow="fold")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(tensor.name, shape, tensor.dtype, f"{tensor.nbytes:,}", str(len(tensor.chunks)))
    out.print(table, highlight=False)
    for group, (count, nbytes) in totals(tensors).items():
        out.print(f"{group}: {count} tensors, {told_bytes(nbytes)}", highlight=False)


def checkpoint_json(
    root: CheckpointRoot, manifest: Manifest, tensors: Sequence[IndexedTensor]
) -> dict[str, Any]:
    """As `print_checkpoint` tells it."""
    return {
        "root": root.uri,
        "step": manifest.step,
        "manifest": to_dict(manifest),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.nbytes,
                "chunks": len(tensor.chunks),
            }
            for tensor in tensors
        ],
        "totals": {
            group: {"tensors": count, "bytes": nbytes} for group, (count, nbytes) in totals(tensors).items()
        },
    }


def differences(one: Manifest, other: Manifest) -> dict[str, tuple[Any, Any]]:
    """(here, there) of what two checkpoints differ in: `config.<field>`, and what else decides how they continue."""
    here, there = _comparable(one), _comparable(other)
    return {
        name: (here.get(name), there.get(name))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    }


def print_differences(told: Mapping[str, tuple[Any, Any]], here: str, there: str) -> None:
    """A row a field."""
    out = console()
    if not told:
        out.print(f"{here} and {there} do not differ", soft_wrap=True, highlight=False, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("field", here, there):
        table.add_column(name, overflow="fold")
    for name, values in told.items():
        table.add_row(name, *(repr(value) for value in values))
    out.print(table, highlight=False, markup=False)


def print_leftovers(root: CheckpointRoot, due: Sequence[Leftover], *, verb: str, now: float) -> None:
    """A row for each that goes or has gone."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for one in due:
        age = f"{(now - one.written_at) / 3600:.1f} h old"
        table.add_row(verb, one.uri.removeprefix(root.uri + "/"), told_bytes(one.size), age)
    out = console()
    if due:
        out.print(table, highlight=False, markup=False)


def kept_lines(root: CheckpointRoot, leftovers: Iterable[Leftover]) -> Iterator[str]:
    """A line for each step and reason."""
    groups: dict[tuple[str, str], list[Leftover]] = defaultdict(list)
    for one in leftovers:
        if one.kept:
            groups[one.uri.removeprefix(root.uri + "/").partition("/")[0], one.kept].append(one)
    for (place, reason), members in groups.items():
        count = f"{len(members)} object{'s' if len(members) > 1 else ''}"
        yield f"kept     {place}: {count}, {told_bytes(sum(one.size for one in members))}: {reason}"


def facts_of(manifest: Manifest) -> dict[str, str]:
    """What a manifest says, in words."""
    best = manifest.best
    return {
        "saved at": told_time(manifest.saved_at) + (" UTC" if manifest.saved_at else ""),
        "size": f"{told_bytes(manifest.size)} in {len(manifest.objects)} objects",
        "seen": f"{manifest.samples_seen:,} samples, {manifest.tokens_seen:,} tokens",
        "written by": f"{_writers(manifest)}, attempt {manifest.attempt}, fencing token {manifest.fencing_token}",
        "best": f"step {best.step}, {best.value:g}" if best else "-",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
        "tokenizer": f"sha256 {manifest.tokenizer_sha256}" if manifest.tokenizer_sha256 else "-",
        "format": str(manifest.format_version),
        "config hash": manifest.config_hash,
    }


def totals(tensors: Iterable[IndexedTensor]) -> dict[str, tuple[int, int]]:
    """(tensors, bytes) by group, such as `model` and `opt`."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        group = tensor.name.partition(".")[0]
        count, nbytes = found.get(group, (0, 0))
        found[group] = (count + 1, nbytes + tensor.nbytes)
    return found


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all that is no object itself, by name."""
    for name, value in sorted(config.items()):
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cells(manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is None:
        return ("-",) * 6
    return (
        told_time(manifest.saved_at),
        told_bytes(manifest.size),
        f"{manifest.samples_seen:,}",
        f"{manifest.tokens_seen:,}",
        _writers(manifest),
        manifest.attempt,
    )


def _writers(manifest: Manifest) -> str:
    return f"{manifest.strategy} x {manifest.world_size}"


def _total(root: CheckpointRoot, states: Sequence[StepState]) -> str:
    count = defaultdict(int, {state.condition: 0 for state in states})
    for state in states:
        count[state.condition] += 1
    size = sum(state.manifest.size for state in states if state.manifest)
    told = ", ".join(
        f"{number} {condition}"
        for condition, number in sorted(count.items(), key=lambda one: one[0] != "whole")
    )
    return f"{root.uri}: {told}; {told_bytes(size)}"


def _state_json(root: CheckpointRoot, state: StepState) -> dict[str, Any]:
    manifest = state.manifest
    return {
        "step": state.step,
        "uri": step_dir_uri(root.uri, state.step),
        "state": state.condition,
        "problems": [str(finding) for finding in state.findings],
        "saved_at": manifest.saved_at if manifest else None,
        "bytes": manifest.size if manifest else None,
        "samples_seen": manifest.samples_seen if manifest else None,
        "tokens_seen": manifest.tokens_seen if manifest else None,
        "strategy": manifest.strategy if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "attempt": manifest.attempt if manifest else None,
    }


def _comparable(manifest: Manifest) -> dict[str, Any]:
    return {
        **{f"config.{name}": value for name, value in leaves(manifest.config)},
        **{f"versions.{name}": version for name, version in manifest.versions.items()},
        "world_size": manifest.world_size,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "format_version": manifest.format_version,
    }
