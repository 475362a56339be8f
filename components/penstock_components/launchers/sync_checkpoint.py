"""Take over what training left behind: its exported model and its newest complete checkpoint, as artifacts.

    python -m penstock_components.launchers.sync_checkpoint --executor-input '{{$}}'

Bytes are copied inside storage, not through this process. Copies have generations of their own, so the manifests at
the destination are rewritten to name them; each is written last. A retry copies only what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock_components.launchers import executor
from penstock_components.launchers.contracts import read_contract
from penstock_components.launchers.errors import CheckpointError, InputError
from penstock_components.launchers.progress import Progress
from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    manifest_uri,
    step_dir_uri,
    step_of,
)
from penstock_trainer.contract.export import MANIFEST_NAME, ExportManifest
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import ObjectInfo, join, storage_for

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 8
"""Below the Storage client's pool of 10 connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    gcp_resources: str
    train_directory: str


def sync_checkpoint(task: executor.ExecutorInput) -> None:
    """Copy the export and the newest complete checkpoint to the artifacts' URIs."""
    inputs = task.parameters_as(Inputs)
    log.info("trained by %s", ", ".join(custom_jobs(inputs.gcp_resources)))
    model, checkpoint = task.output("model"), task.output("checkpoint")
    export = _find_export(inputs.train_directory)
    root = join(inputs.train_directory, "checkpoints")
    newest = _find_checkpoint(root)
    export = _copy_export(join(inputs.train_directory, "model"), model.uri, export)
    newest = _copy_checkpoint(root, checkpoint.uri, newest)
    executor.write_outputs(
        task,
        parameters={"model_uri": model.uri},
        metadata={
            "model": {
                "framework": "pytorch",
                "step": export.step,
                "tokens_seen": export.tokens_seen,
                "num_parameters": export.num_parameters,
                "world_size": export.world_size,
            },
            "checkpoint": {
                "step": newest.step,
                "tokens_seen": newest.tokens_seen,
                "strategy": newest.strategy,
                "world_size": newest.world_size,
                "config_hash": newest.config_hash,
            },
        },
    )


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


def _find_checkpoint(root: str) -> Manifest:
    """The newest checkpoint that is whole; those that are not are passed over and named in the log."""
    step_dirs = {step_of(uri): uri for uri in storage_for(root).list_dirs(root)}
    for step in sorted((step for step in step_dirs if step is not None), reverse=True):
        uri = manifest_uri(root, step)
        if storage_for(uri).stat(uri) is None:
            log.warning("%s passed over: no manifest, it was not saved to its end", step_dirs[step])
            continue
        try:
            manifest = Manifest.from_json(storage_for(uri).read(uri))
        except ContractError as exc:
            log.warning("%s passed over: %s", step_dirs[step], exc)
            continue
        damaged = [
            entry.name for entry in manifest.objects if _standing(step_dir_uri(root, step), entry) is None
        ]
        if not damaged:
            return manifest
        log.warning("%s passed over: %s missing or damaged", step_dirs[step], ", ".join(damaged))
    raise CheckpointError(
        f"there is no complete checkpoint under {root}: expected {root}/step-<number>/manifest.json and the objects it "
        f"names. Directories there: {', '.join(step_dirs.values()) or 'none'}. The trainer saves to AIP_CHECKPOINT_DIR, "
        "which is <base_output_directory>/checkpoints."
    )


def _copy_export(source_dir: str, target_dir: str, manifest: ExportManifest) -> ExportManifest:
    objects = _copy_all(source_dir, target_dir, manifest.objects)
    copied = dataclasses.replace(manifest, objects=objects)
    _publish(join(target_dir, MANIFEST_NAME), copied.to_json())
    log.info("%s: the export of step %d, %d objects", target_dir, manifest.step, len(objects))
    return copied


def _copy_checkpoint(source_root: str, target_root: str, manifest: Manifest) -> Manifest:
    """The target is a checkpoint root again, so that a later run can name it as `resume_from`."""
    source_dir, target_dir = (step_dir_uri(root, manifest.step) for root in (source_root, target_root))
    objects = _copy_all(source_dir, target_dir, manifest.objects)
    copied = dataclasses.replace(manifest, objects=objects)
    _publish(manifest_uri(target_root, manifest.step), copied.to_json())
    log.info("%s: the checkpoint of step %d, %d objects", target_dir, manifest.step, len(objects))
    return copied


def _copy_all(
    source_dir: str, target_dir: str, objects: Iterable[CheckpointObject]
) -> tuple[CheckpointObject, ...]:
    objects = tuple(objects)
    progress = Progress(total=sum(entry.size for entry in objects), unit="bytes copied")
    copied = []
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        for entry, info in zip(
            objects, pool.map(lambda entry: _copy(source_dir, target_dir, entry), objects), strict=True
        ):
            copied.append(dataclasses.replace(entry, generation=info.generation))
            progress.advance(entry.size)
    return tuple(copied)


def _copy(source_dir: str, target_dir: str, entry: CheckpointObject) -> ObjectInfo:
    standing = _standing(target_dir, entry)
    if standing is not None:
        return standing
    source, target = join(source_dir, entry.name), join(target_dir, entry.name)
    info = storage_for(source).copy(source, target)
    if (info.size, info.crc32c) != (entry.size, entry.crc32c):
        raise CheckpointError(
            f"{target} is not what {source}'s manifest names: size {info.size} and CRC32C {info.crc32c} instead of "
            f"{entry.size} and {entry.crc32c}. The object was overwritten or damaged after training; train again."
        )
    return info


def _standing(directory_uri: str, entry: CheckpointObject) -> ObjectInfo | None:
    """The object of this name, if it has the bytes that the manifest names."""
    uri = join(directory_uri, entry.name)
    info = storage_for(uri).stat(uri)
    return info if info is not None and (info.size, info.crc32c) == (entry.size, entry.crc32c) else None


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
