"""What a lightweight Python task sees below `/gcs`: its input artifacts as files before, its output files after.

On Vertex that is a mount of every bucket. Here a task gets the objects that its ExecutorInput names, and what it
leaves at the paths of its output artifacts becomes objects when it has succeeded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_local.storage import ObjectStore
from penstock_local.storage.errors import BucketNotFoundError


@dataclass(frozen=True, slots=True)
class GcsView:
    """The directory that stands for `/gcs` in one task."""

    root: Path
    objects: ObjectStore

    def bring_in(self, executor_input: Mapping[str, Any]) -> None:
        """Make the input artifacts' objects readable as files."""
        for uri in _artifact_uris(executor_input.get("inputs", {})):
            bucket, name = _split(uri)
            # An artifact may point to a bucket that is not here: only a task that reads it should fail.
            with contextlib.suppress(BucketNotFoundError):
                for found in self._objects_below(bucket, name):
                    self._write(bucket, found)

    def bring_out(self, executor_input: Mapping[str, Any]) -> None:
        """Store the files below the output artifacts' paths as objects."""
        for uri in _artifact_uris(executor_input.get("outputs", {})):
            bucket, name = _split(uri)
            for path in _files_at(self.root / bucket / name):
                with path.open("rb") as file:
                    self.objects.put(bucket, str(path.relative_to(self.root / bucket)), file)

    def remove(self) -> None:
        """Delete the files of the view; the objects stay."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _objects_below(self, bucket: str, name: str) -> Iterator[str]:
        """The object of that name, and those below it as a folder."""
        token, folder = "", f"{name.rstrip('/')}/" if name else ""
        while True:
            page = self.objects.list(bucket, prefix=name, page_token=token)
            for found in page.objects:
                if found.name == name or found.name.startswith(folder):
                    yield found.name
            token = page.next_page_token
            if not token:
                return

    def _write(self, bucket: str, name: str) -> None:
        path = self.root / bucket / name
        if name.endswith("/") or not path.resolve().is_relative_to(self.root.resolve()):
            return  # a folder marker, or a name such as `../x`, which no mount can show either
        path.parent.mkdir(parents=True, exist_ok=True)
        _, payload = self.objects.open(bucket, name)
        with payload, path.open("wb") as file:
            shutil.copyfileobj(payload, file)


def _artifact_uris(side: Mapping[str, Any]) -> Iterator[str]:
    for group in side.get("artifacts", {}).values():
        for artifact in group.get("artifacts", ()):
            if artifact.get("uri", "").startswith("gs://"):
                yield artifact["uri"]


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for directory, _, names in os.walk(path):
        for name in sorted(names):
            yield Path(directory) / name


def _split(uri: str) -> tuple[str, str]:
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return bucket, name


@contextlib.contextmanager
def gcs_view(root: Path, objects: ObjectStore, executor_input: Mapping[str, Any]) -> Iterator[GcsView]:
    """A view filled with the task's inputs, removed at the end."""
    view = GcsView(root, objects)
    try:
        view.bring_in(executor_input)
        yield view
    finally:
        view.remove()
