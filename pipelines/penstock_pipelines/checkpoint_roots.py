"""Checkpoint roots as a user names them: a URI, a path, or a run; opened, or told what is there instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_pipelines.errors import InputError, ServiceError
from penstock_pipelines.settings import load_settings
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import Manifest, step_dir_uri, step_of
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectNotFoundError,
    StorageError,
    StorageUnavailableError,
    join,
    storage_for,
)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Errors of storage as the command's: ServiceError where another try can help, InputError for what is refused: no such
    object or bucket, no permission."""
    try:
        yield
    except StorageUnavailableError as exc:
        raise ServiceError(str(exc)) from exc
    except StorageError as exc:
        raise InputError(str(exc)) from exc


def uri_of(given: str) -> str | None:
    """The URI that a path or a URI stands for; None for what can only be the name of a run."""
    if "://" in given:
        return given.rstrip("/")
    path = Path(given).expanduser()
    is_path = "/" in given or given in (".", "..") or path.exists()
    return path.absolute().as_uri() if is_path else None


def root_uri(given: str, settings_file: Path | None) -> str:
    """The root that is meant. A run's is where the pipeline lets it train; the settings know below which directory."""
    uri = uri_of(given)
    if uri is not None:
        return uri
    try:
        settings = load_settings(settings_file)
    except InputError as exc:
        raise InputError(
            f"there is no path {given!r}, and for a run of that id the settings are needed: {exc}"
        ) from exc
    return join(settings.pipeline_root, given, "train", "checkpoints")


def open_root(given: str, settings_file: Path | None) -> CheckpointRoot:
    """The root, which has at least one step directory. Raises InputError and ServiceError."""
    uri = root_uri(given, settings_file)
    step = step_of(uri)
    if step is not None:
        parent = uri.rpartition("/")[0]
        raise InputError(f"{uri} is the directory of one step. Give its parent, {parent}, and --step {step}.")
    with storage_errors():
        root = CheckpointRoot(uri, storage_for(uri))
        if root.steps():
            return root
        raise InputError(
            f"there are no checkpoints below {uri}: it has no step-<number> directory.{_hint(root)}"
        )


def chosen_manifest(root: CheckpointRoot, step: int | None) -> Manifest:
    """That of a step, or of the newest step that has one. Raises InputError, which names the nearest, and ServiceError."""
    with storage_errors():
        if step is not None:
            require_step(root, step)
            return _manifest(root, step)
        for each in root.steps():
            try:
                return root.manifest(each)
            except (ObjectNotFoundError, ObjectCorruptError, ContractError):
                continue
    raise InputError(
        f"no step below {root.uri} has a manifest that can be read; `penstock checkpoints list` says why."
    )


def require_step(root: CheckpointRoot, step: int) -> None:
    """Raises InputError unless the step has a directory."""
    steps = root.steps()
    if step not in steps:
        nearest = min(steps, key=lambda each: abs(each - step))
        raise InputError(
            f"there is no step {step} below {root.uri}; the nearest is {nearest}. There are: "
            f"{', '.join(map(str, sorted(steps)))}."
        )


def _manifest(root: CheckpointRoot, step: int) -> Manifest:
    directory = step_dir_uri(root.uri, step)
    try:
        return root.manifest(step)
    except ObjectNotFoundError as exc:
        raise InputError(
            f"{directory} is no checkpoint: it has no manifest, as it was not saved to its end."
        ) from exc
    except (ObjectCorruptError, ContractError) as exc:
        raise InputError(f"{directory} has no manifest that can be read: {exc}") from exc


def _hint(root: CheckpointRoot) -> str:
    """What else the user may have meant."""
    below = {uri.rpartition("/")[2] for uri in root.storage.list_dirs(root.uri)}
    for names in (("checkpoints",), ("train", "checkpoints")):
        if names[0] in below and CheckpointRoot(join(root.uri, *names), root.storage).steps():
            return f" There are some below {join(root.uri, *names)}; give that."
    if "node-0" in below:
        return " It holds the copy of a script's checkpoint directory (`launch --checkpoint-dir`), which has no steps."
    return f" Directories there: {', '.join(sorted(below)) or 'none'}."
