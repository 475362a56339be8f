"""Which program stands for an image here: a TOML map from repository names to interpreters on this machine.

    [images."us-central1-docker.pkg.dev/acme/penstock/trainer"]
    python = "/home/me/penstock/.venv/bin/python"      # default: the interpreter of the stand-in
    entrypoint = ["python", "-m", "penstock_trainer"]  # what runs when a container spec has no command
    env = { OMP_NUM_THREADS = "1" }

Tag and digest of an image are ignored: locally the working tree is what an image is built from. The executor image of a
Python-package job is looked up here too; it needs no entry point, but pip and setuptools in its interpreter.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GCPC_REPOSITORY = "gcr.io/ml-pipeline/google-cloud-pipeline-components"
REDUCTION_SERVER_REPOSITORIES = tuple(
    f"{region}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver"
    for region in ("us", "europe", "asia")
)


class UnknownImageError(Exception):
    """No entry of the image map covers the image."""


class ImageMapError(ValueError):
    """The image map cannot be read; the message names the file and the entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalImage:
    """What runs in place of a container."""

    repository: str
    python: Path
    """Its directory leads PATH, so that `python`, `python3` and `pip` of a command are this interpreter's."""
    entrypoint: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command_line(self, command: tuple[str, ...], args: tuple[str, ...]) -> tuple[str, ...]:
        """The program and its arguments, as a container runtime puts them together."""
        return (*(command or self.entrypoint), *args)


class ImageMap:
    """Images by repository."""

    def __init__(self, images: Mapping[str, LocalImage]) -> None:
        self._images = {**_built_in(), **images}

    def resolve(self, image_uri: str) -> LocalImage:
        """The local program for an image. Raises UnknownImageError, which lists what is known."""
        repository = repository_of(image_uri)
        image = self._images.get(repository)
        if image is None:
            raise UnknownImageError(
                f"image {image_uri!r} is not in the image map. Known repositories: {', '.join(sorted(self._images))}. "
                f'Add a table [images."{repository}"] to the map that the stand-in is started with.'
            )
        return image


def load_image_map(path: Path | None) -> ImageMap:
    """Read a map file; None gives the built-in images alone. Raises ImageMapError."""
    if path is None:
        return ImageMap({})
    try:
        told = tomllib.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ImageMapError(f"image map {path}: {exc}") from exc
    tables = told.pop("images", {})
    if told or not isinstance(tables, dict):
        raise ImageMapError(f'image map {path}: only tables [images."REPOSITORY"] are allowed in it.')
    return ImageMap(
        {repository: _local_image(path, repository, table) for repository, table in tables.items()}
    )


def repository_of(image_uri: str) -> str:
    """`HOST/PATH/NAME` without tag and digest."""
    name = image_uri.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def _local_image(path: Path, repository: str, table: Any) -> LocalImage:
    if not _is_well_formed(table):
        raise ImageMapError(
            f"image map {path}: {repository} is {table!r}; allowed are python (a path), entrypoint (an array of "
            "strings) and env (a table of strings)."
        )
    if repository != repository_of(repository):
        raise ImageMapError(f"image map {path}: give {repository_of(repository)!r}, without tag or digest.")
    return LocalImage(
        repository=repository,
        python=Path(table.get("python", sys.executable)),
        entrypoint=tuple(table.get("entrypoint", ())),
        env=dict(table.get("env", {})),
    )


def _is_well_formed(table: Any) -> bool:
    if not isinstance(table, dict) or set(table) - {"python", "entrypoint", "env"}:
        return False
    entrypoint, env = table.get("entrypoint", []), table.get("env", {})
    texts = [table.get("python", ""), *entrypoint, *(env.values() if isinstance(env, dict) else [None])]
    return isinstance(entrypoint, list) and all(isinstance(text, str) for text in texts)


def _built_in() -> dict[str, LocalImage]:
    python = Path(sys.executable)
    placeholder = (str(python), "-m", "penstock_local.jobs.reduction_placeholder")
    reducers = {
        repository: LocalImage(repository=repository, python=python, entrypoint=placeholder)
        for repository in REDUCTION_SERVER_REPOSITORIES
    }
    return {GCPC_REPOSITORY: LocalImage(repository=GCPC_REPOSITORY, python=python), **reducers}
