"""The checkpoint directory of somebody's script, copied to storage while it runs and back before it starts anew.

What holds. Objects are written first, each under a name of its own, and then the manifest that names them, on the
condition that it still is the one this launcher wrote before. So a reader finds the directory as one sync saw it, never
half of two; a launcher that was replaced and wakes up again fails to write; and a sync that is cut off at any point
leaves the copy before it whole. A file that changed while it was read keeps the entry that it had, or none, until a sync
reads it at rest. Each file is whole, then, but files that a script writes one after another may be of two moments: a
script that needs several to agree writes them elsewhere and renames their directory into place, or writes a marker last
and trusts only what the marker names. Nodes are copied independently.

A file is compared by inode, size and modification time, and read again only when those differ or are so young that
another write could hide behind them. Bytes that storage has are not sent again. Only regular files are copied, with
their bytes and names: symbolic links to files as the files they point to, links to directories not at all.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c

from penstock_trainer.contract.fields import ContractError
from penstock_trainer.contract.script_checkpoint import (
    FORMAT_VERSION,
    ScriptFile,
    ScriptManifest,
    node_uri,
    script_manifest_uri,
)
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectNotFoundError,
    Storage,
    StorageError,
    join,
    storage_for,
)

logger = logging.getLogger(__name__)

Signature = tuple[int, int, int]
"""Inode, size, modification time in nanoseconds."""

# Coarser than the clock ticks of file systems: a file that was written within this time may be written again without a
# change of its signature.
_SETTLED_SECONDS = 1.0
_LAST_TRIES = 3
_BETWEEN_TRIES_SECONDS = 2.0


class ScriptCheckpoints:
    """One node's directory and its copy. For one thread at a time; every method blocks on storage."""

    def __init__(self, directory: Path, uri: str, node_rank: int) -> None:
        self._directory = directory
        self._uri = node_uri(uri, node_rank)
        self._storage: Storage = storage_for(self._uri)
        self._writer = secrets.token_hex(4)
        self._syncs = 0
        self._files: dict[str, ScriptFile] = {}
        self._generation = 0
        self._seen: dict[str, Signature] = {}

    def open(self) -> None:
        """Take the copy over from whoever wrote it, and restore the directory from it when that is empty or missing.

        Raises StorageError, ObjectCorruptError among them, ContractError when the manifest is not one, and OSError. The
        directory then is as it was, because files are restored beside it and moved into place at the end.
        """
        manifest_uri = script_manifest_uri(self._uri)
        info = self._storage.stat(manifest_uri)
        if info is not None:
            self._generation = info.generation
            text = self._storage.read(manifest_uri, generation=info.generation)
            self._files = {file.name: file for file in ScriptManifest.from_json(text).files}
        self._commit(self._files.values())
        if self._files and not (self._directory.exists() and any(self._directory.iterdir())):
            self._restore()
        self._directory.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        """Make the copy what the directory is now. Raises StorageError, and OSError when files cannot be read."""
        self._syncs += 1
        files = {}
        for name in sorted(self._names()):
            file = self._saved(name, self._files.get(name))
            if file is not None:
                files[name] = file
        if files == self._files:
            return
        before, self._files = self._files, files
        try:
            self._commit(files.values())
        except StorageError:
            self._files = before
            self._seen = {}
            raise
        kept = {file.object_name for file in files.values()}
        self._delete(file for file in before.values() if file.object_name not in kept)
        logger.info("%s has %d files of %s", self._uri, len(files), self._directory)

    def _commit(self, files: Iterable[ScriptFile]) -> None:
        manifest = ScriptManifest(format_version=FORMAT_VERSION, writer=self._writer, files=tuple(files))
        info = self._storage.write(
            script_manifest_uri(self._uri),
            manifest.to_json().encode(),
            if_generation_match=self._generation,
            content_type="application/json",
        )
        self._generation = info.generation

    def _names(self) -> Iterator[str]:
        for directory, _, names in os.walk(self._directory):
            for name in names:
                path = Path(directory, name)
                if path.is_file():
                    yield path.relative_to(self._directory).as_posix()

    def _saved(self, name: str, standing: ScriptFile | None) -> ScriptFile | None:
        """The entry of a file whose bytes are in storage; `standing` when it did not rest long enough to be read."""
        path = self._directory / name
        signature = _signature(path)
        if signature is None:
            return None
        if standing and self._seen.get(name) == signature:
            return standing
        file = standing
        try:
            if standing is None or not _is_copy(path, standing):
                file = self._upload(path, name)
        except (StorageError, FileNotFoundError):
            if _signature(path) == signature:
                raise
        if _signature(path) != signature:
            logger.info("%s changed while it was read; left for the next sync", path)
            self._delete([file] if file and file is not standing else [])
            return standing
        if time.time() - signature[2] / 1e9 > _SETTLED_SECONDS:
            self._seen[name] = signature
        return file

    def _upload(self, path: Path, name: str) -> ScriptFile:
        object_name = f"files/{self._writer}-{self._syncs}/{name}"
        info = self._storage.upload(path, join(self._uri, object_name))
        return ScriptFile(
            name=name,
            object_name=object_name,
            generation=info.generation,
            size=info.size,
            crc32c=info.crc32c,
        )

    def _delete(self, files: Iterable[ScriptFile]) -> None:
        for file in files:
            uri = join(self._uri, file.object_name)
            try:
                self._storage.delete(uri, if_generation_match=file.generation)
            except ObjectNotFoundError:
                pass
            except StorageError as exc:
                logger.warning("%s is no longer needed and cannot be deleted: %s", uri, exc)

    def _restore(self) -> None:
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        staging = self._directory.with_name(f".{self._directory.name}-{self._writer}")
        staging.mkdir()
        try:
            for file in self._files.values():
                self._download(file, staging / file.name)
            staging.replace(self._directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        logger.info("restored %d files of %s from %s", len(self._files), self._directory, self._uri)

    def _download(self, file: ScriptFile, path: Path) -> None:
        uri = join(self._uri, file.object_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._storage.download(uri, path)
        if not _is_copy(path, file):
            raise ObjectCorruptError(
                f"{uri} is not the object that was written: expected {file.size} bytes with crc32c {file.crc32c}, "
                f"found {path.stat().st_size} bytes with crc32c {_crc32c(path)}."
            )


class SyncLoop(threading.Thread):
    """Syncs every `interval_seconds` while the ranks of one round run, and a last time after `end`.

    A sync that fails is logged and tried again with the next; the last one is tried three times, and `error` then says
    why the directory's last state is not in storage.
    """

    def __init__(self, checkpoints: ScriptCheckpoints, interval_seconds: float) -> None:
        super().__init__(name="sync", daemon=True)
        self._checkpoints = checkpoints
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self.error: str = "the last sync has not ended"
        """Empty once the last sync has succeeded. Final when the thread has ended."""

    def run(self) -> None:
        """The thread's body."""
        while not self._ended.wait(self._interval_seconds):
            self._sync()
        for tries_left in reversed(range(_LAST_TRIES)):
            self.error = self._sync()
            if not self.error:
                return
            if tries_left:
                time.sleep(_BETWEEN_TRIES_SECONDS)

    def end(self) -> None:
        """The ranks have ended: sync once more and finish. Does not block; a second call does nothing."""
        self._ended.set()

    def _sync(self) -> str:
        try:
            self._checkpoints.sync()
        except (StorageError, ContractError, OSError) as exc:
            logger.error("the checkpoint directory was not saved: %s", exc)
            return str(exc)
        return ""


def _signature(path: Path) -> Signature | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_copy(path: Path, file: ScriptFile) -> bool:
    return path.stat().st_size == file.size and _crc32c(path) == file.crc32c


def _crc32c(path: Path) -> str:
    """As storage.crc32c, a piece at a time: not mapped, for a file that shrinks meanwhile would end the process."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum.update(piece)
    return base64.b64encode(checksum.digest()).decode()
