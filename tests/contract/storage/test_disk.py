"""What only a disk does: fill up, go stale, refuse, and hold files that nobody wants to be read."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from penstock_trainer.storage import (
    PIECE_BYTES,
    FileStorage,
    StorageError,
    StorageUnavailableError,
    crc32c,
)
from penstock_trainer.storage.files import disk_errors


def test_a_listing_reads_no_file(tmp_path: Path) -> None:
    storage = FileStorage()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a hole of a TiB: reading it would take minutes
    [found] = storage.list_objects(tmp_path.as_uri() + "/")
    assert (found.size, found.crc32c) == (1 << 40, "")
    (tmp_path / "huge").write_bytes(b"small")
    stat = storage.stat(found.uri)
    assert stat is not None
    assert stat.crc32c == crc32c(b"small")


def test_a_file_is_uploaded_a_piece_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(3 * PIECE_BYTES + 1))
    tracemalloc.start()
    info = FileStorage().upload(tmp_path / "large", (tmp_path / "target").as_uri())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * PIECE_BYTES  # a piece being written while the next is read
    assert info.crc32c == crc32c((tmp_path / "large").read_bytes())


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    uri = (tmp_path / "big").as_uri()
    with (
        pytest.raises(
            StorageError, match=rf"{uri}: No space left on device at {tmp_path}/big \(\d+ bytes free\)"
        ),
        disk_errors(uri),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EDQUOT, "quota there is used up"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "account that runs this process"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_stays_wrong_says_what_to_do(tmp_path: Path, number: int, remedy: str) -> None:
    uri = (tmp_path / "x").as_uri()
    with pytest.raises(StorageError, match=f"{uri}.*{remedy}") as caught, disk_errors(uri):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is StorageError


def test_a_stale_handle_may_be_tried_again(tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    with pytest.raises(StorageUnavailableError, match=uri), disk_errors(uri):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
