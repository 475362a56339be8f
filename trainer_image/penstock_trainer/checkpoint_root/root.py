"""The step directories below one URI: read, judged by what storage tells of their objects, and deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    manifest_uri,
    step_dir_uri,
    step_of,
)
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    Storage,
    join,
    path_of,
    storage_for,
)

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Requests in flight; below the pool of 10 connections of Google's client."""

Condition = Literal["whole", "damaged", "not committed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a checkpoint that is not as its manifest says."""

    uri: str
    problem: str
    """What differs; reads on from the URI."""

    def __str__(self) -> str:
        return f"{self.uri} {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    """A step directory, as storage describes its objects."""

    step: int
    condition: Condition
    manifest: Manifest | None = None
    """None where there is none, or none that can be read."""
    findings: tuple[Finding, ...] = ()
    """Why it is damaged."""


class CheckpointRoot:
    """The step directories below one URI. Every method blocks on storage and raises StorageError."""

    def __init__(self, uri: str, storage: Storage | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.storage = storage or storage_for(uri)

    def steps(self) -> list[int]:
        """Steps that have a directory, newest first; not each is a checkpoint."""
        found = (step_of(uri) for uri in self.storage.list_dirs(self.uri))
        return sorted((step for step in found if step is not None), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """What makes the step a checkpoint. Raises ObjectNotFoundError, and ContractError when it is no manifest of it."""
        manifest = Manifest.from_json(self.storage.read(manifest_uri(self.uri, step)))
        if manifest.step != step:
            raise ContractError(
                f"the manifest is that of step {manifest.step}, in the directory of step {step}."
            )
        return manifest

    def state(self, step: int, *, checksums: bool = True) -> StepState:
        """Whether the step is a checkpoint, and what is wrong with it; no payload is read from Cloud Storage.

        On disk every file is read for its checksum, or with `checksums=False` judged by size and time.
        """
        try:
            manifest = self.manifest(step)
        except ObjectNotFoundError:
            return StepState(step=step, condition="not committed")
        except (ObjectCorruptError, ContractError) as exc:
            told = Finding(manifest_uri(self.uri, step), f"cannot be read: {exc}")
            return StepState(step=step, condition="damaged", findings=(told,))
        findings = tuple(
            Finding(self._uri(manifest, entry), difference(entry, info))
            for entry, info in self.standing(manifest, checksums=checksums)
            if difference(entry, info)
        )
        condition: Condition = "damaged" if findings else "whole"
        return StepState(step=step, condition=condition, manifest=manifest, findings=findings)

    def whole(self, step: int) -> Manifest:
        """The manifest, once every object that it names was found to be the one that was written.

        As storage describes objects: no payload is read from Cloud Storage. Raises ObjectNotFoundError,
        ObjectCorruptError or ContractError.
        """
        manifest = self.manifest(step)
        for entry, info in self.standing(manifest):
            if problem := difference(entry, info):
                error = ObjectNotFoundError if info is None else ObjectCorruptError
                raise error(f"{self._uri(manifest, entry)} {problem}")
        return manifest

    def whole_steps(self) -> Iterator[Manifest]:
        """Checkpoints that are whole, newest first; of one that is not, the log names the part and the reason."""
        for step in self.steps():
            manifest = self.whole_or_none(step)
            if manifest is not None:
                yield manifest

    def whole_or_none(self, step: int) -> Manifest | None:
        """As `whole`; None for a step that is not, whose damaged part is named in the log."""
        state = self.state(step)
        if state.condition == "whole":
            return state.manifest
        if state.condition == "not committed":
            logger.info("%s passed over: it was not saved to its end", step_dir_uri(self.uri, step))
        else:
            logger.warning("%s; falling back to the checkpoint before step %d", state.findings[0], step)
        return None

    def standing(
        self, manifest: Manifest, *, checksums: bool = True
    ) -> list[tuple[CheckpointObject, ObjectInfo | None]]:
        """What stands in the place of each object of the manifest; None for nothing.

        By listing, for a checkpoint of a big model has thousands of objects. On disk a listing tells no checksum: with
        `checksums` those files are read that have the size and the generation of what was written.
        """
        directory = step_dir_uri(self.uri, manifest.step)
        prefixes = sorted({entry.name.rpartition("/")[0] for entry in manifest.objects})
        found = {
            location(info.uri): info
            for prefix in prefixes
            for info in self.storage.list_objects(join(directory, prefix).rstrip("/") + "/")
        }
        listed = [found.get(location(join(directory, entry.name))) for entry in manifest.objects]
        if checksums:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                listed = list(pool.map(self._with_checksum, manifest.objects, listed))
        return list(zip(manifest.objects, listed, strict=True))

    def delete(self, manifest: Manifest) -> None:
        """Remove a checkpoint: its manifest first, so that no reader finds half of it. What is gone already is no error.

        Only that checkpoint: raises PreconditionFailedError, and removes nothing, when another manifest stands in its
        place, as when a newer attempt has saved the step again. An object that was written again since is left, for
        `find_leftovers`. On disk, directories that are then empty go too.
        """
        uri = manifest_uri(self.uri, manifest.step)
        if (standing := self.storage.stat(uri)) is not None:
            self._require_same(uri, standing, manifest)
            with suppress(ObjectNotFoundError):
                self.storage.delete(uri, if_generation_match=standing.generation)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(self._delete_object, manifest), manifest.objects))
        directory = step_dir_uri(self.uri, manifest.step)
        remove_if_empty(
            [*{join(directory, entry.name).rpartition("/")[0] for entry in manifest.objects}, directory]
        )

    def _with_checksum(self, entry: CheckpointObject, info: ObjectInfo | None) -> ObjectInfo | None:
        if info is None or info.crc32c or difference(entry, info):
            return info
        return self.storage.stat(info.uri)

    def _require_same(self, uri: str, standing: ObjectInfo, manifest: Manifest) -> None:
        try:
            found = Manifest.from_json(self.storage.read(uri, generation=standing.generation))
        except (ObjectNotFoundError, ObjectCorruptError, ContractError) as exc:
            raise PreconditionFailedError(f"{uri} is not the manifest that was to be deleted: {exc}") from exc
        if found.to_json() != manifest.to_json():
            raise PreconditionFailedError(
                f"{uri} is by now the manifest of attempt {found.attempt} with fencing token {found.fencing_token}, and "
                f"not that of attempt {manifest.attempt} with token {manifest.fencing_token}, which was to be deleted."
            )

    def _delete_object(self, manifest: Manifest, entry: CheckpointObject) -> None:
        with suppress(ObjectNotFoundError, PreconditionFailedError):
            self.storage.delete(self._uri(manifest, entry), if_generation_match=entry.generation)

    def _uri(self, manifest: Manifest, entry: CheckpointObject) -> str:
        return join(step_dir_uri(self.uri, manifest.step), entry.name)


def difference(entry: CheckpointObject, info: ObjectInfo | None) -> str:
    """What tells an object from the one that was written, after its URI; empty when nothing does.

    A checksum that is not known is not compared.
    """
    if info is None:
        return "is missing, but the manifest names it"
    compared = [
        ("generation", entry.generation, info.generation),
        ("size", entry.size, info.size),
        *([("crc32c", entry.crc32c, info.crc32c)] if info.crc32c else []),
    ]
    other = [f"{name} {found} instead of {written}" for name, written, found in compared if found != written]
    if not other:
        return ""
    told = f"is not the object that was written: {', '.join(other)}"
    if (info.size, info.crc32c) == (entry.size, entry.crc32c):
        told += " (the same bytes, written again: readers take only the generation that the manifest names)"
    return told


def location(uri: str) -> str:
    """The one spelling of a URI: those of files may be quoted or not."""
    return str(path_of(uri)) if uri.startswith("file://") else uri


def remove_if_empty(directory_uris: Iterable[str]) -> bool:
    """Remove directories on disk in which nothing is left, the inner ones first; whether any went. Object stores have none."""
    removed = False
    for uri in sorted((uri for uri in directory_uris if uri.startswith("file://")), key=len, reverse=True):
        with suppress(OSError):  # not empty, gone, or not ours to remove
            path_of(uri).rmdir()
            removed = True
    return removed
