"""What no manifest names: objects of saves that were cut off, found and removed without touching what anybody may need.

An object below a step directory is a leftover when the step's manifest does not name it, or there is no manifest. It is
removed only if nobody can still make it part of a checkpoint:

- it is of the checkpoint layout: anybody's other files stay;
- its step's manifest can be read, or there is none: with a manifest that is damaged or of a newer format, all stays;
- it is not of the attempt that owner.json names, which may be writing. Every attempt before that one is fenced: it cannot
  commit any more. Once the run is over, the caller may say so, and what its last attempt has left goes too;
- it is older than a day, or whatever the caller says: a root need not have an owner.json (`sync_checkpoint` fills one).

On disk, temporary files of writers that were killed are leftovers too, by age alone: no write takes a day.
"""

from __future__ import annotations

import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from penstock_trainer.checkpoint_root.root import AT_ONCE, CheckpointRoot, location, remove_if_empty
from penstock_trainer.contract.checkpoint import Owner, manifest_uri, owner_uri, step_dir_uri, step_of
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectNotFoundError,
    PreconditionFailedError,
    path_of,
)

DEFAULT_AGE_SECONDS = 24 * 3600.0
TEMPORARY_PREFIX = ".writing-"
"""Of a file that FileStorage writes before it gets its name."""
_LAYOUT = re.compile(r"(?P<directory>[\w.-]+)/(\d+(-\d+)?\.distcp|index\.json)")
_ON_DISK = re.compile(rf"(?:(?P<directory>[\w.-]+)/)?(?:{re.escape(TEMPORARY_PREFIX)}\w+)?")
"""An empty directory, or a temporary file."""
_EARLIEST = 1262304000.0
"""2010: no object of Cloud Storage is older."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """An object that no manifest names; on disk also a temporary file, or an empty directory."""

    uri: str
    """That of a directory ends in a slash."""
    size: int
    """Bytes."""
    generation: int
    written_at: float
    """Seconds since the epoch."""
    kept: str = ""
    """Why it must stay; empty for garbage."""


def find_leftovers(
    root: CheckpointRoot,
    *,
    min_age_seconds: float = DEFAULT_AGE_SECONDS,
    is_finished: bool = False,
    now: float | None = None,
) -> list[Leftover]:
    """What no manifest names, by step, and whether it may go.

    `is_finished`: no attempt runs any more, not even the one in owner.json. `now` is the time to compare with, by default
    the clock's. Blocks on storage; raises StorageError.
    """
    now = time.time() if now is None else now
    protected = "" if is_finished else _owner_directory(root)
    found: list[Leftover] = []
    for step in reversed(root.steps()):
        # Listed before the manifest is read: what is committed in between is named then.
        listed = list(_below(root, step_dir_uri(root.uri, step), now))
        named, reason = _named(root, step)
        for one in listed:
            name = _name(one.uri, step_dir_uri(root.uri, step))
            if name not in named:
                found.append(replace(one, kept=reason or _why_kept(one.uri, name, protected)))
    found += _temporary_files(root)
    young = f"it is younger than {_told(min_age_seconds)}"
    return [
        replace(one, kept=young) if not one.kept and now - one.written_at < min_age_seconds else one
        for one in found
    ]


def remove_leftovers(root: CheckpointRoot, leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Delete those that may go, and on disk the directories that are empty then; what was deleted.

    Each in the generation that was found, and after another look at its step's manifest: what was written or committed
    since stays. What is gone already is passed over. Blocks on storage; raises StorageError.
    """
    by_step: dict[int | None, list[Leftover]] = defaultdict(list)
    for leftover in leftovers:
        if not leftover.kept:
            by_step[_step_of(root, leftover.uri)].append(leftover)
    removed: list[Leftover] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for step, of_step in by_step.items():
            named, reason = _named(root, step) if step is not None else (frozenset[str](), "")
            if reason:
                continue
            directory = step_dir_uri(root.uri, step) if step is not None else root.uri
            due = [one for one in of_step if _name(one.uri, directory) not in named]
            are_removed = pool.map(partial(_remove, root), due)
            removed += [one for one, is_removed in zip(due, are_removed, strict=True) if is_removed]
    parents = {one.uri.rstrip("/").rpartition("/")[0] for one in removed}
    emptied = {uri for parent in parents for uri in (parent, parent.rpartition("/")[0])}
    remove_if_empty(uri for uri in emptied if _step_of(root, uri) is not None)
    return removed


def _remove(root: CheckpointRoot, leftover: Leftover) -> bool:
    if leftover.uri.endswith("/"):
        return remove_if_empty([leftover.uri])
    try:
        root.storage.delete(leftover.uri, if_generation_match=leftover.generation)
    except (ObjectNotFoundError, PreconditionFailedError):
        return False
    return True


def _named(root: CheckpointRoot, step: int) -> tuple[frozenset[str], str]:
    """Names that the step's manifest protects, and why nothing of the step may be touched (empty: it may)."""
    own = frozenset([manifest_uri("", step).rpartition("/")[2]])
    try:
        manifest = root.manifest(step)
    except ObjectNotFoundError:
        return own, ""
    except (ObjectCorruptError, ContractError) as exc:
        return own, f"the step's manifest cannot be read ({exc})"
    # Both spellings: on disk `a//b` is the file `a/b`.
    return own | {
        name for entry in manifest.objects for name in (entry.name, str(PurePosixPath(entry.name)))
    }, ""


def _owner_directory(root: CheckpointRoot) -> str:
    """What the names of the owner's directories begin with; `/` if that cannot be known, empty without an owner."""
    try:
        return Owner.from_json(root.storage.read(owner_uri(root.uri))).attempt
    except ObjectNotFoundError:
        return ""
    except (ObjectCorruptError, ContractError):
        return "/"


def _why_kept(uri: str, name: str, protected: str) -> str:
    match = _LAYOUT.fullmatch(name)
    if match is None and uri.startswith("file://"):
        match = _ON_DISK.fullmatch(name)
    if match is None:
        return "it is not of the checkpoint layout"
    if protected == "/":
        return "owner.json cannot be read, so its attempt may be running"
    if protected and (match["directory"] or "").startswith(protected):
        return f"attempt {protected} owns the root and may be running"
    return ""


def _below(root: CheckpointRoot, directory_uri: str, now: float) -> Iterator[Leftover]:
    if directory_uri.startswith("file://"):  # what storage would list is read for its checksum
        path = path_of(directory_uri)
        yield from _files([path, *path.rglob("*")])
        return
    for info in root.storage.list_objects(directory_uri + "/"):
        # Cloud Storage's generations are microseconds since the epoch. As that is nowhere promised, a number that is no
        # time of the past counts as now, which keeps the object.
        seconds = info.generation / 1e6
        written_at = seconds if _EARLIEST < seconds <= now else now
        yield Leftover(uri=info.uri, size=info.size, generation=info.generation, written_at=written_at)


def _files(paths: Iterable[Path]) -> Iterator[Leftover]:
    """Files and empty directories among the paths."""
    for path in sorted(paths):
        with suppress(FileNotFoundError):  # a writer's temporary file, published meanwhile
            status = path.lstat()
            is_dir = stat.S_ISDIR(status.st_mode)
            if not is_dir or not any(path.iterdir()):
                yield Leftover(
                    uri=path.as_uri() + ("/" if is_dir else ""),
                    size=0 if is_dir else status.st_size,
                    generation=status.st_mtime_ns,
                    written_at=status.st_mtime_ns / 1e9,
                )


def _temporary_files(root: CheckpointRoot) -> Iterator[Leftover]:
    """Those outside of the step directories: of owner.json, and of what else lies beside the steps."""
    if root.uri.startswith("file://"):
        for one in _files(path_of(root.uri).rglob(f"{TEMPORARY_PREFIX}*")):
            if _step_of(root, one.uri) is None and not one.uri.endswith("/"):
                yield one


def _name(uri: str, directory_uri: str) -> str:
    """Under the directory; empty for the directory itself."""
    slash = "/" if uri.endswith("/") else ""
    return (location(uri) + slash).removeprefix(location(directory_uri)).removeprefix("/")


def _step_of(root: CheckpointRoot, uri: str) -> int | None:
    """The step whose directory a URI is, or lies in."""
    inside = location(uri).removeprefix(location(root.uri) + "/")
    return step_of(inside.partition("/")[0]) if inside != location(uri) else None


def _told(seconds: float) -> str:
    return f"{seconds / 3600:g} h"
