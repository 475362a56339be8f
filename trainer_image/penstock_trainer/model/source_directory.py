"""A Hugging Face directory as files on disk, wherever it lies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_trainer.errors import ModelError
from penstock_trainer.storage import join, path_of, storage_for

CONFIG_NAME = "config.json"
_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""What transformers reads; the same weights in other formats are left behind."""


def is_directory(source: str) -> bool:
    """Whether a model's source is written as a directory, rather than as `module:function`."""
    return source.startswith("/") or "://" in source


@contextmanager
def source_directory(source_uri: str) -> Iterator[Path]:
    """The directory at gs://, file:// or an absolute path; one at gs:// is downloaded and goes with the context.

    Blocks on storage. Raises ModelError when there is no config.json in it, and StorageError.
    """
    if not source_uri.startswith("gs://"):
        directory = path_of(source_uri) if "://" in source_uri else Path(source_uri)
        _require_config(directory, source_uri)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="model-") as temporary:
        directory = Path(temporary)
        _download(source_uri, directory)
        _require_config(directory, source_uri)
        yield directory


def _download(source_uri: str, directory: Path) -> None:
    storage, prefix = storage_for(source_uri), join(source_uri, "")
    for found in storage.list_objects(prefix):
        name = found.uri.removeprefix(prefix)
        if "/" not in name and name.endswith(_SUFFIXES):
            storage.download(found.uri, directory / name)


def _require_config(directory: Path, source_uri: str) -> None:
    if not (directory / CONFIG_NAME).is_file():
        raise ModelError(
            f"{source_uri} is not a Hugging Face model: it has no {CONFIG_NAME}. "
            "Give the directory that save_pretrained, or an export of a run, has written."
        )
