"""Objects as files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_trainer.storage.objects import (
    PIECE_BYTES,
    Buffer,
    Crc32c,
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    crc32c,
    path_of,
)

_TEMPORARY_PREFIX = ".writing-"
_REMEDIES = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints (keep_last), or give a directory on a larger disk.",
    errno.EDQUOT: "The quota there is used up: free space, or have it raised.",
    errno.EROFS: "The file system is mounted read-only: mount it for writing, or give another directory.",
    errno.EACCES: "Give the account that runs this process access to it, or give another directory.",
}


class FileStorage:
    """Objects as files below file:///. A write is a temporary file, fsync, then a link or a rename: readers never see half."""

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """See Storage.read. There is no stored checksum on disk to verify against; callers' manifests carry one."""
        with disk_errors(uri), path_of(uri).open("rb") as file:
            if generation is not None and os.fstat(file.fileno()).st_mtime_ns != generation:
                raise _overwritten(uri, generation)
            file.seek(start)
            data = file.read() if length is None else file.read(length)
        if length is not None and len(data) != length:
            raise ObjectCorruptError(
                f"{uri}: asked for {length} bytes from {start}, the file gave {len(data)}."
            )
        return data

    def write(
        self,
        uri: str,
        data: Buffer,
        *,
        if_generation_match: int | None = None,
        content_type: str = "application/octet-stream",  # noqa: ARG002  # files carry no content type
        known_crc32c: str | None = None,
    ) -> ObjectInfo:
        """See Storage.write. A condition other than 0 is checked and applied under a lock on the directory."""
        return self._write(uri, (data,), if_generation_match, lambda: known_crc32c or crc32c(data))

    def write_pieces(
        self,
        uri: str,
        pieces: Iterable[Buffer],
        *,
        if_generation_match: int | None = None,
        expected_crc32c: str | None = None,
    ) -> ObjectInfo:
        """As `write`, of the pieces one after another, none of which is kept in memory.

        Raises ObjectCorruptError, and publishes nothing, when they do not have the expected CRC32C.
        """
        running = Crc32c()

        def passing() -> Iterator[Buffer]:
            for piece in pieces:
                running.update(piece)
                yield piece

        def checksum() -> str:
            if expected_crc32c not in (None, running.base64):
                raise ObjectCorruptError(f"{uri}: CRC32C is {running.base64} instead of {expected_crc32c}.")
            return running.base64

        return self._write(uri, passing(), if_generation_match, checksum)

    def stat(self, uri: str) -> ObjectInfo | None:
        """See Storage.stat. Reads the file for its checksum."""
        try:
            with disk_errors(uri), path_of(uri).open("rb") as file:
                status, checksum = os.fstat(file.fileno()), Crc32c()
                while piece := file.read(1 << 20):
                    checksum.update(piece)
                return ObjectInfo(uri, status.st_size, status.st_mtime_ns, checksum.base64)
        except ObjectNotFoundError:
            return None

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """See Storage.list_objects."""
        prefix = str(path_of(prefix_uri)) + ("/" if prefix_uri.endswith("/") else "")
        top = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
        with disk_errors(prefix_uri):
            paths = sorted(path for path in _files_below(top) if str(path).startswith(prefix))
        for path in paths:
            if not path.name.startswith(_TEMPORARY_PREFIX):
                try:
                    with disk_errors(path.as_uri()):
                        status = path.stat()
                except ObjectNotFoundError:
                    continue  # removed meanwhile
                yield ObjectInfo(path.as_uri(), status.st_size, status.st_mtime_ns, "")

    def list_dirs(self, directory_uri: str) -> list[str]:
        """See Storage.list_dirs."""
        path = path_of(directory_uri)
        with disk_errors(directory_uri):
            return (
                sorted(child.as_uri() for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
            )

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """See Storage.delete."""
        path = path_of(uri)
        with disk_errors(uri), _locked(path.parent):
            if if_generation_match is not None and path.stat().st_mtime_ns != if_generation_match:
                raise PreconditionFailedError(f"{uri} is not in generation {if_generation_match}.")
            path.unlink()

    def copy(
        self,
        source_uri: str,
        target_uri: str,
        *,
        source_generation: int | None = None,
        if_generation_match: int | None = None,
    ) -> ObjectInfo:
        """See Storage.copy."""
        path_of(target_uri)
        with disk_errors(source_uri):
            file = path_of(source_uri).open("rb")
        with file:
            if source_generation not in (None, os.fstat(file.fileno()).st_mtime_ns):
                raise _overwritten(source_uri, source_generation)
            pieces = iter(lambda: file.read(PIECE_BYTES), b"")
            return self.write_pieces(target_uri, pieces, if_generation_match=if_generation_match)

    def download(self, uri: str, path: Path) -> None:
        """See Storage.download."""
        with disk_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_of(uri), path)

    def upload(self, path: Path, uri: str, *, if_generation_match: int | None = None) -> ObjectInfo:
        """See Storage.upload."""
        try:
            file = path.open("rb")
        except OSError as exc:  # of a file that is not the object
            raise StorageError(f"{uri}: cannot read what is to be uploaded: {exc}") from exc
        with file:
            pieces = iter(lambda: file.read(PIECE_BYTES), b"")
            return self.write_pieces(uri, pieces, if_generation_match=if_generation_match)

    def _write(
        self,
        uri: str,
        pieces: Iterable[Buffer],
        if_generation_match: int | None,
        checksum: Callable[[], str],
    ) -> ObjectInfo:
        """`checksum` is asked once all pieces are written; when it raises, nothing is published."""
        path = path_of(uri)
        temporary = path.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        with disk_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    size = sum(file.write(piece) for piece in pieces)
                    file.flush()
                    # The kernel's own stamp moves in ticks of milliseconds; two writes within one would share a
                    # generation.
                    stamp = time.time_ns()
                    os.utime(file.fileno(), ns=(stamp, stamp))
                    os.fsync(file.fileno())
                    # As the file system keeps it: some round it.
                    generation = os.fstat(file.fileno()).st_mtime_ns
                found = checksum()
                self._publish(temporary, path, uri, if_generation_match)
            finally:
                temporary.unlink(missing_ok=True)
            return ObjectInfo(uri, size, generation, found)

    @staticmethod
    def _publish(temporary: Path, path: Path, uri: str, if_generation_match: int | None) -> None:
        if if_generation_match is None:
            temporary.replace(path)
            return
        if if_generation_match == 0:
            try:
                path.hardlink_to(temporary)  # fails when the name exists, also between processes and over NFS
            except FileExistsError as exc:
                raise PreconditionFailedError(f"{uri} exists already.") from exc
            return
        with _locked(path.parent):
            standing = path.stat().st_mtime_ns if path.exists() else 0
            if standing != if_generation_match:
                raise PreconditionFailedError(
                    f"{uri} is in generation {standing}, not {if_generation_match}."
                )
            temporary.replace(path)


def _files_below(top: Path) -> Iterator[Path]:
    """A directory that is removed meanwhile has none; raises OSError for one that cannot be read."""

    def pass_over(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for directory, _, names in os.walk(top, onerror=pass_over):
        yield from (Path(directory, name) for name in names)


@contextmanager
def disk_errors(uri: str, path: Path | None = None) -> Iterator[None]:
    """Raises what goes wrong with a file as StorageError; `path` is the file's where `uri` is not that of a file.

    A stale NFS handle is StorageUnavailableError: the server came back with another one, and a new open finds it.
    """
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
        raise ObjectNotFoundError(f"{uri} does not exist: {exc.strerror}.") from exc
    except OSError as exc:
        if exc.errno == errno.ESTALE:
            raise StorageUnavailableError(f"{uri}: {exc.strerror}; the file server was restarted.") from exc
        raise StorageError(_described(uri, path or path_of(uri), exc)) from exc


def _described(uri: str, path: Path, error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return f"{uri}: {error}"
    space = f" ({_free_bytes(path)} bytes free)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{uri}: {error.strerror} at {path}{space}. {remedy}"


def _free_bytes(path: Path) -> int:
    """On the file system on which `path` is or would be."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _overwritten(uri: str, generation: int | None) -> ObjectNotFoundError:
    return ObjectNotFoundError(f"{uri} does not exist in generation {generation}; it was overwritten.")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One conditional writer at a time in a directory; the lock goes with the process that holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
