"""Objects as files."""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import google_crc32c

from penstock_trainer.storage.objects import (
    Buffer,
    ObjectCorruptError,
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    crc32c,
    path_of,
)

_TEMPORARY_PREFIX = ".writing-"


class FileStorage:
    """Objects as files below file:///. A write is a temporary file, fsync, then a link or a rename: readers never see half."""

    def read(
        self, uri: str, *, start: int = 0, length: int | None = None, generation: int | None = None
    ) -> bytes:
        """See Storage.read. There is no stored checksum on disk to verify against; callers' manifests carry one."""
        with _file_errors(uri), path_of(uri).open("rb") as file:
            if generation is not None and os.fstat(file.fileno()).st_mtime_ns != generation:
                raise ObjectNotFoundError(
                    f"{uri} does not exist in generation {generation}; it was overwritten."
                )
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
    ) -> ObjectInfo:
        """See Storage.write. A condition other than 0 is checked and applied under a lock on the directory."""
        path = path_of(uri)
        temporary = path.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        with _file_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    # The kernel's own stamp moves in ticks of milliseconds; two writes within one would share a
                    # generation.
                    stamp = time.time_ns()
                    os.utime(file.fileno(), ns=(stamp, stamp))
                    os.fsync(file.fileno())
                self._publish(temporary, path, uri, if_generation_match)
            finally:
                temporary.unlink(missing_ok=True)
            return ObjectInfo(uri, len(data), path.stat().st_mtime_ns, crc32c(data))

    def stat(self, uri: str) -> ObjectInfo | None:
        """See Storage.stat. Reads the file for its checksum."""
        path = path_of(uri)
        try:
            with _file_errors(uri):
                status = path.stat()
                return ObjectInfo(uri, status.st_size, status.st_mtime_ns, _file_crc32c(path))
        except ObjectNotFoundError:
            return None

    def list_objects(self, prefix_uri: str) -> Iterator[ObjectInfo]:
        """See Storage.list_objects."""
        prefix = str(path_of(prefix_uri)) + ("/" if prefix_uri.endswith("/") else "")
        top = Path(prefix) if prefix.endswith("/") else Path(prefix).parent
        for path in sorted(top.rglob("*")):
            if (
                path.is_file()
                and str(path).startswith(prefix)
                and not path.name.startswith(_TEMPORARY_PREFIX)
            ):
                info = self.stat(path.as_uri())
                if info is not None:
                    yield info

    def list_dirs(self, directory_uri: str) -> list[str]:
        """See Storage.list_dirs."""
        path = path_of(directory_uri)
        with _file_errors(directory_uri):
            return (
                sorted(child.as_uri() for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
            )

    def delete(self, uri: str, *, if_generation_match: int | None = None) -> None:
        """See Storage.delete."""
        path = path_of(uri)
        with _file_errors(uri), _locked(path.parent):
            if if_generation_match is not None and path.stat().st_mtime_ns != if_generation_match:
                raise PreconditionFailedError(f"{uri} is not in generation {if_generation_match}.")
            path.unlink()

    def copy(self, source_uri: str, target_uri: str) -> ObjectInfo:
        """See Storage.copy."""
        from penstock_trainer.storage import storage_for

        source = path_of(source_uri)
        if not source.is_file():
            raise ObjectNotFoundError(f"{source_uri} does not exist.")
        return storage_for(target_uri).upload(source, target_uri)

    def download(self, uri: str, path: Path) -> None:
        """See Storage.download."""
        with _file_errors(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path_of(uri), path)

    def upload(self, path: Path, uri: str) -> ObjectInfo:
        """See Storage.upload."""
        try:
            data = path.read_bytes()
        except OSError as exc:  # of a file that is not the object
            raise StorageError(f"{uri}: {exc}") from exc
        return self.write(uri, data)

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


def _file_crc32c(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode()


@contextmanager
def _file_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
        raise ObjectNotFoundError(f"{uri} does not exist: {exc.strerror}.") from exc
    except OSError as exc:
        raise StorageError(f"{uri}: {exc}") from exc


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One conditional writer at a time in a directory; the lock goes with the process that holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
