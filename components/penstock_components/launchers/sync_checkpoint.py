"""Take over what training left behind: its exported model and its newest complete checkpoint, as artifacts.

    python -m penstock_components.launchers.sync_checkpoint --executor-input '{{$}}'

Both go to the artifacts' URIs, and to a second bucket or region if one is given. Bytes are copied inside storage, not
through this process. Copies have generations of their own, so the manifests at the destination are rewritten to name them;
each is written last, once every object was looked at again. A retry copies only what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penstock_components.launchers import executor
from penstock_components.launchers.contracts import read_contract
from penstock_components.launchers.errors import CheckpointError, InputError
from penstock_components.launchers.progress import Progress
from penstock_trainer.checkpoint_root import CheckpointRoot, StepState
from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest, manifest_uri, step_dir_uri
from penstock_trainer.contract.export import MANIFEST_NAME, ExportManifest
from penstock_trainer.storage import (
    ObjectInfo,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    copy_object,
    join,
    storage_for,
)

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 8
"""Below the Storage client's pool of 10 connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    gcp_resources: str
    train_directory: str
    destination: str = ""
    run_name: str = ""

    @property
    def second(self) -> str:
        """Where the second copy goes; empty for nowhere."""
        return join(self.destination, self.run_name).rstrip("/") if self.destination else ""


def sync_checkpoint(task: executor.ExecutorInput) -> None:
    """Copy the export and the newest complete checkpoint to the artifacts' URIs, and to the destination."""
    inputs = task.parameters_as(Inputs)
    log.info("trained by %s", ", ".join(custom_jobs(inputs.gcp_resources)))
    model, checkpoint = task.output("model"), task.output("checkpoint")
    model_source, root = join(inputs.train_directory, "model"), join(inputs.train_directory, "checkpoints")
    targets = [(model.uri, checkpoint.uri)]
    if inputs.second:
        _require_usable(inputs, [inputs.train_directory, model.uri, checkpoint.uri])
        targets.append((join(inputs.second, "model"), join(inputs.second, "checkpoints")))
    export = _find_export(inputs.train_directory)
    newest = _find_checkpoint(root)
    for model_target, root_target in targets:
        _copy_export(model_source, model_target, export)
        _copy_checkpoint(root, root_target, newest)
    executor.write_outputs(
        task,
        parameters={"model_uri": model.uri},
        metadata=_metadata(export, newest, second=inputs.second),
    )


def _metadata(export: ExportManifest, newest: Manifest, *, second: str) -> dict[str, dict[str, Any]]:
    """By output artifact; `copy` says where else it lies."""
    return {
        "model": {
            "framework": "pytorch",
            "step": export.step,
            "tokens_seen": export.tokens_seen,
            "num_parameters": export.num_parameters,
            "world_size": export.world_size,
            **({"copy": join(second, "model")} if second else {}),
        },
        "checkpoint": {
            "step": newest.step,
            "tokens_seen": newest.tokens_seen,
            "strategy": newest.strategy,
            "world_size": newest.world_size,
            "config_hash": newest.config_hash,
            **({"copy": join(second, "checkpoints")} if second else {}),
        },
    }


def _require_usable(inputs: Inputs, others: Iterable[str]) -> None:
    """Before anything is copied. Raises InputError for a destination that is none (another scheme, no such bucket, no
    permission) or that lies in what is copied, and StorageUnavailableError."""
    second = inputs.second
    if second.partition("://")[0] != inputs.train_directory.partition("://")[0]:
        raise InputError(
            f"destination = {inputs.destination!r} must be a gs:// directory of another bucket, or empty."
        )
    for other in others:
        if (second + "/").startswith(other.rstrip("/") + "/") or (other + "/").startswith(second + "/"):
            raise InputError(
                f"destination = {inputs.destination!r} with run_name = {inputs.run_name!r} is {second}, and what is copied "
                f"there lies at {other}: neither may be inside of the other. Give a directory of another bucket."
            )
    try:
        storage_for(second).list_dirs(second)
    except StorageUnavailableError:
        raise
    except StorageError as exc:
        raise InputError(f"destination = {inputs.destination!r} cannot be used: {exc}") from exc


def custom_jobs(gcp_resources: str) -> list[str]:
    """URIs of the CustomJobs that a gcp_resources output names. Raises InputError if there is none."""
    try:
        resources = json.loads(gcp_resources).get("resources", [])
        uris = [entry["resourceUri"] for entry in resources if entry["resourceType"] == "CustomJob"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(
            f"gcp_resources = {gcp_resources[:200]!r} is not the gcp_resources output of a training task ({exc!r})."
        ) from exc
    if not uris:
        raise InputError(
            f"gcp_resources = {gcp_resources[:200]!r} names no CustomJob. Pass the gcp_resources output of the train task."
        )
    return uris


def _find_export(train_directory: str) -> ExportManifest:
    uri = join(train_directory, "model", MANIFEST_NAME)
    if storage_for(uri).stat(uri) is None:
        raise CheckpointError(
            f"there is no export at {uri}. The trainer exports to AIP_MODEL_DIR, which is <base_output_directory>/model: the "
            f"train task must have finished, with base_output_directory = {train_directory}."
        )
    return read_contract(uri, ExportManifest.from_json, what="model export's manifest")


def _find_checkpoint(uri: str) -> Manifest:
    """The newest checkpoint that is whole; those that are not are passed over and named in the log."""
    root = CheckpointRoot(uri)
    steps = root.steps()
    for step in steps:
        state = root.state(step)
        if state.condition == "whole" and state.manifest is not None:
            return state.manifest
        log.warning("%s passed over: %s", step_dir_uri(uri, step), _told(state, step_dir_uri(uri, step)))
    raise CheckpointError(
        f"there is no complete checkpoint under {uri}: expected {uri}/step-<number>/manifest.json and the objects it "
        f"names. Directories there: {', '.join(step_dir_uri(uri, step) for step in steps) or 'none'}. The trainer saves to "
        "AIP_CHECKPOINT_DIR, which is <base_output_directory>/checkpoints."
    )


def _told(state: StepState, directory: str) -> str:
    """Why a step is no checkpoint."""
    if state.condition == "not committed":
        return "no manifest, it was not saved to its end"
    if state.manifest is None:
        return "; ".join(map(str, state.findings))
    damaged = ", ".join(finding.uri.removeprefix(directory + "/") for finding in state.findings)
    return f"{damaged} missing or damaged ({state.findings[0]})"


def _copy_export(source_dir: str, target_dir: str, manifest: ExportManifest) -> None:
    objects = _copy_all(source_dir, target_dir, manifest.objects)
    copied = dataclasses.replace(manifest, objects=objects)
    _publish(join(target_dir, MANIFEST_NAME), copied.to_json())
    log.info("%s: the export of step %d, %d objects", target_dir, manifest.step, len(objects))


def _copy_checkpoint(source_root: str, target_root: str, manifest: Manifest) -> None:
    """The target is a checkpoint root again, so that a later run can name it as `resume_from`."""
    source_dir, target_dir = (step_dir_uri(root, manifest.step) for root in (source_root, target_root))
    objects = _copy_all(source_dir, target_dir, manifest.objects)
    copied = dataclasses.replace(manifest, objects=objects)
    _publish(manifest_uri(target_root, manifest.step), copied.to_json())
    log.info("%s: the checkpoint of step %d, %d objects", target_dir, manifest.step, len(objects))


def _copy_all(
    source_dir: str, target_dir: str, objects: Iterable[CheckpointObject]
) -> tuple[CheckpointObject, ...]:
    """The objects as they stand at the target, each looked at again once all are there."""
    objects = tuple(objects)
    progress = Progress(total=sum(entry.size for entry in objects), unit="bytes copied")
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        copies = pool.map(lambda entry: _copy(source_dir, target_dir, entry), objects)
        for entry, _ in zip(objects, copies, strict=True):
            progress.advance(entry.size)
        standing = list(pool.map(lambda entry: _standing(target_dir, entry), objects))
    copied = []
    for entry, info in zip(objects, standing, strict=True):
        if info is None:
            raise CheckpointError(
                f"{join(target_dir, entry.name)} was copied, and is missing or another object now: something else writes to "
                f"{target_dir}. Give each run a directory of its own."
            )
        copied.append(dataclasses.replace(entry, generation=info.generation))
    return tuple(copied)


def _copy(source_dir: str, target_dir: str, entry: CheckpointObject) -> None:
    """Leave an object with the entry's bytes at the target: the one that stands there, or a copy in its place."""
    source, target = join(source_dir, entry.name), join(target_dir, entry.name)
    there = storage_for(target).stat(target)
    if _is_same(there, entry):
        return
    try:
        info = copy_object(
            source,
            target,
            source_generation=entry.generation,
            # What another task has copied meanwhile is not replaced: a manifest may name its generation by now.
            if_generation_match=there.generation if there else 0,
        )
    except PreconditionFailedError:
        standing = storage_for(target).stat(target)
        if standing is None:
            raise
        info = standing
    except ObjectNotFoundError as exc:
        raise CheckpointError(
            f"{source} is gone, or not what its manifest names: {exc} Train again."
        ) from exc
    if not _is_same(info, entry):
        raise CheckpointError(
            f"{target} is not what {source}'s manifest names: size {info.size} and CRC32C {info.crc32c} instead of "
            f"{entry.size} and {entry.crc32c}. The object was overwritten or damaged after training; train again."
        )


def _standing(directory_uri: str, entry: CheckpointObject) -> ObjectInfo | None:
    """The object of this name, if it has the bytes that the manifest names."""
    uri = join(directory_uri, entry.name)
    info = storage_for(uri).stat(uri)
    return info if _is_same(info, entry) else None


def _is_same(info: ObjectInfo | None, entry: CheckpointObject) -> bool:
    return info is not None and (info.size, info.crc32c) == (entry.size, entry.crc32c)


def _publish(uri: str, text: str) -> None:
    """Write a manifest over nothing but what was seen there; one that says the same already is left."""
    storage = storage_for(uri)
    standing = storage.stat(uri)
    if standing is not None and storage.read(uri) == text.encode():
        return
    storage.write(
        uri,
        text.encode(),
        if_generation_match=standing.generation if standing else 0,
        content_type="application/json",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the task."""
    return executor.run(sync_checkpoint, argv)


if __name__ == "__main__":
    sys.exit(main())
