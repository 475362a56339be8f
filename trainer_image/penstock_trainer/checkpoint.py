"""Checkpoints of a run: snapshot, write, commit; and continue from the newest that is whole.

A step becomes a checkpoint with its manifest, which rank 0 writes after every rank's objects. What a writer left behind
that did not get so far is never read. The layout is penstock_trainer.contract.checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from penstock_trainer.checkpoint_io import ObjectReader, ObjectWriter
from penstock_trainer.checkpoints.ownership import check_ownership, replace_as_owner
from penstock_trainer.contract.checkpoint import (
    FORMAT_VERSION,
    Best,
    CheckpointObject,
    Manifest,
    Owner,
    manifest_uri,
    step_dir_uri,
    step_of,
)
from penstock_trainer.contract.config import (
    DataConfig,
    EvaluationConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
)
from penstock_trainer.contract.dataset import TOKENIZER_NAME
from penstock_trainer.contract.fields import ContractError, to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.errors import CheckpointError, FencedError
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectNotFoundError,
    Storage,
    StorageError,
    join,
    storage_for,
)
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_WITHOUT_BEST = "Restore it, or set evaluation.export_best to false to export the weights of the last step."


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the run is, over all attempts."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    tokens_seen: int = 0
    """Targets that were trained on."""
    best: Best | None = None
    """The best step so far, where the run evaluates."""
    stale_evaluations: int = 0
    """Evaluations since the best one."""

    def after(self, *, samples: int, targets: int) -> Progress:
        """After one more step over so many samples, in which so many targets were."""
        return replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + targets,
        )

    def evaluated(self, value: float, *, is_best: bool) -> Progress:
        """After the step was evaluated to a value of the run's metric."""
        if is_best:
            return replace(self, best=Best(step=self.step, value=value), stale_evaluations=0)
        return replace(self, stale_evaluations=self.stale_evaluations + 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State as of one step. Its tensors must not change until it is written."""

    progress: Progress
    state: State


class Checkpointer:
    """The one writer below a checkpoint root, as long as `owner` is what owner.json says. Methods are collective unless they say so."""

    def __init__(
        self,
        root_uri: str,
        owner: Owner,
        config: JobConfig,
        world: World,
        storage: Storage | None = None,
        *,
        tokenizer_sha256: str,
    ) -> None:
        self.root_uri = root_uri.rstrip("/")
        self.owner = owner
        self._config = config
        self._tokenizer_sha256 = tokenizer_sha256
        self._world = world
        self._storage = storage or storage_for(root_uri)

    def save(self, snapshot: Snapshot) -> str:
        """Write and commit; the step's directory. Blocks until the manifest stands.

        Raises FencedError when another attempt has taken over, before anything is written or before the commit.
        """
        uri = step_dir_uri(self.root_uri, snapshot.progress.step)
        self._world.from_primary(self.check_owner)
        writer = self._write(snapshot, uri)
        self._commit(snapshot.progress, writer)
        logger.info("saved step %d to %s", snapshot.progress.step, uri)
        return uri

    def restore(self, state: State) -> Progress | None:
        """Fill `state` from the newest whole checkpoint, of this root or else of resume_from; None when there is none.

        One with a missing or corrupt part is named in the log and the one before is taken. Raises CheckpointError when
        resume_from is needed and has none, when the model's shape or the tokenizer is another, and when the checkpoint
        is further than the run goes: beyond the last step, or for resume_from at it, as nothing would be trained then.
        """
        progress = self._restore_from(self.root_uri, state, self._storage)
        earlier = self._config.checkpoint.resume_from
        if progress is None and earlier:
            progress = self._restore_from(earlier, state, storage_for(earlier))
            if progress is None:
                raise CheckpointError(
                    f"checkpoint.resume_from = {earlier!r} has no checkpoint that can be read. "
                    "Give the root of an earlier run's step directories, or leave it empty to begin anew."
                )
        return progress

    def load(self, state: State, step: int) -> tuple[Progress, str]:
        """Fill `state` from the checkpoint of one step, of this root or else of resume_from; and the step's directory.

        Raises CheckpointError (PeerError on the other ranks) when there is none that is whole; `state` may then be filled
        in part.
        """
        manifest, root_uri = self._world.from_primary(lambda: self._find(step))
        if not self._fill(state, manifest, root_uri, self._storage_of(root_uri)):
            raise CheckpointError(
                f"the checkpoint of step {step} below {root_uri} broke while it was read. See the log. {_WITHOUT_BEST}"
            )
        return self._progress_of(manifest), step_dir_uri(root_uri, step)

    def check_owner(self) -> None:
        """Raise FencedError unless this attempt still owns the root. Not collective: blocks on storage alone."""
        check_ownership(self.root_uri, self.owner, self._storage)

    def _write(self, snapshot: Snapshot, uri: str) -> ObjectWriter:
        writer = ObjectWriter(self._storage, uri, attempt=self.owner.attempt, rank=self._world.env.rank)
        try:
            dcp_save(snapshot.state, storage_writer=writer, process_group=self._world.control)
        except CheckpointException as exc:  # not an Exception
            raise CheckpointError(f"writing {uri} failed: {_reasons(exc)}") from exc
        return writer

    def _commit(self, progress: Progress, writer: ObjectWriter) -> None:
        objects = [entry for written in self._world.gather(writer.written) for entry in written]
        self._world.from_primary(
            lambda: self._write_manifest(self._manifest(progress, writer.index_name, objects))
        )

    def _manifest(self, progress: Progress, index: str, objects: list[CheckpointObject]) -> Manifest:
        config: Mapping[str, Any] = json.loads(self._config.to_json())
        return Manifest(
            format_version=FORMAT_VERSION,
            step=progress.step,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            best=progress.best,
            stale_evaluations=progress.stale_evaluations,
            config=config,
            config_hash=self._config.hash,
            tokenizer_sha256=self._tokenizer_sha256,
            strategy=self._config.engine.strategy,
            world_size=self._world.env.world_size,
            versions=_versions(self._config),
            attempt=self.owner.attempt,
            fencing_token=self.owner.fencing_token,
            index=index,
            objects=tuple(objects),
        )

    def _write_manifest(self, manifest: Manifest) -> None:
        """Make the step a checkpoint.

        What stands there already is damaged, or was committed late by an attempt before this one: otherwise this run
        would have continued from it. It is replaced.
        """
        uri = manifest_uri(self.root_uri, manifest.step)
        data = manifest.to_json().encode()

        def check() -> None:
            self.check_owner()
            _require_no_newer(self._storage, uri, self.owner)

        replace_as_owner(
            self._storage,
            uri,
            check,
            lambda generation: self._storage.write(
                uri, data, if_generation_match=generation, content_type="application/json"
            ),
        )

    def _restore_from(self, root_uri: str, state: State, storage: Storage) -> Progress | None:
        is_touched = False
        for step in self._world.from_primary(lambda: _steps(storage, root_uri)):
            manifest = self._world.from_primary(partial(_whole_manifest, storage, root_uri, step))
            if manifest is None:
                continue
            self._require_continuable(manifest, root_uri)
            is_touched = True
            if self._fill(state, manifest, root_uri, storage):
                logger.info("continuing from step %d of %s", manifest.step, root_uri)
                return self._progress_of(manifest)
            logger.warning("falling back to the checkpoint before step %d", step)
        if is_touched:
            raise CheckpointError(
                f"the checkpoints below {root_uri} broke while they were read, and none is left. See the log."
            )
        return None

    def _require_continuable(self, manifest: Manifest, root_uri: str) -> None:
        uri = step_dir_uri(root_uri, manifest.step)
        _require_same_model(manifest, self._config, uri)
        _require_same_optimizer(manifest, self._config, uri)
        _require_same_tokenizer(manifest, self._tokenizer_sha256, self._config.data.uri, uri)
        steps = self._config.steps
        if manifest.step > steps:
            raise CheckpointError(
                f"{uri} is at step {manifest.step} and the run ends at steps = {steps}, which counts the steps of all "
                "attempts. Give more steps, or another checkpoint root."
            )
        if manifest.step == steps and root_uri != self.root_uri:
            raise CheckpointError(
                f"checkpoint.resume_from = {root_uri!r} is at step {manifest.step} and the run ends at steps = {steps}, "
                f"which counts the steps before it too: nothing would be trained. Raise steps above {manifest.step}."
            )

    def _find(self, step: int) -> tuple[Manifest, str]:
        """The whole manifest of a step, and the root that it lies in. Not collective."""
        reasons = []
        for root_uri in filter(None, (self.root_uri, self._config.checkpoint.resume_from)):
            try:
                return _read_whole(self._storage_of(root_uri), root_uri, step), root_uri
            except (ObjectNotFoundError, ObjectCorruptError, ContractError) as exc:
                reasons.append(f"below {root_uri}: {exc}")
        raise CheckpointError(
            f"the checkpoint of step {step} is gone or damaged: {'; '.join(reasons)}. {_WITHOUT_BEST}"
        )

    def _storage_of(self, root_uri: str) -> Storage:
        return self._storage if root_uri == self.root_uri else storage_for(root_uri)

    def _progress_of(self, manifest: Manifest) -> Progress:
        """Of what was evaluated otherwise, nothing is kept: its values do not compare."""
        is_comparable = _evaluated_as(manifest.config) == _evaluated_as(json.loads(self._config.to_json()))
        if not is_comparable and manifest.best:
            logger.info("the best step is forgotten: it was found by another metric or on other samples")
        return Progress(
            step=manifest.step,
            samples_seen=manifest.samples_seen,
            tokens_seen=manifest.tokens_seen,
            best=manifest.best if is_comparable else None,
            stale_evaluations=manifest.stale_evaluations if is_comparable else 0,
        )

    def _fill(self, state: State, manifest: Manifest, root_uri: str, storage: Storage) -> bool:
        """Whether all of it could be read. Ranks agree: the planner gathers their errors."""
        reader = ObjectReader(storage, step_dir_uri(root_uri, manifest.step), manifest)
        state = _written_part(state, manifest)
        try:
            dcp_load(state, storage_reader=reader, process_group=self._world.control)
        except CheckpointException as exc:  # not an Exception
            errors = [error for error, _ in exc.failures.values()]
            if not all(isinstance(error, (StorageError, ContractError)) for error in errors):
                raise CheckpointError(f"reading the checkpoint failed: {_reasons(exc)}") from exc
            logger.warning("reading step %d of %s failed: %s", manifest.step, root_uri, _reasons(exc))
            return False
        return True


def _require_no_newer(storage: Storage, uri: str, owner: Owner) -> None:
    """Raise FencedError if a later attempt has committed the manifest, as it may where owner.json was removed."""
    try:
        standing = Manifest.from_json(storage.read(uri))
    except ObjectNotFoundError:
        return
    except (ObjectCorruptError, ContractError) as exc:
        logger.warning("replacing %s, which is no manifest: %s", uri, exc)
        return
    if standing.fencing_token > owner.fencing_token:
        raise FencedError(
            f"{uri} was committed by attempt {standing.attempt} with fencing token {standing.fencing_token}; this is "
            f"attempt {owner.attempt} with token {owner.fencing_token}, which must not replace it. Give another "
            "checkpoint root."
        )
    logger.warning("replacing the manifest that stands at %s, which this run did not continue from", uri)


def _steps(storage: Storage, root_uri: str) -> list[int]:
    """Steps that have a directory, newest first."""
    found = (step_of(uri) for uri in storage.list_dirs(root_uri))
    return sorted((step for step in found if step is not None), reverse=True)


def _whole_manifest(storage: Storage, root_uri: str, step: int) -> Manifest | None:
    """The step's manifest if it is one and every object it names is the one that was written; else None, and why."""
    uri = manifest_uri(root_uri, step)
    try:
        return _read_whole(storage, root_uri, step)
    except ObjectNotFoundError as exc:
        if storage.stat(uri) is not None:
            logger.warning("%s; falling back to the checkpoint before step %d", exc, step)
        return None
    except (ObjectCorruptError, ContractError) as exc:
        logger.warning("%s: %s; falling back to the checkpoint before step %d", uri, exc, step)
        return None


def _read_whole(storage: Storage, root_uri: str, step: int) -> Manifest:
    """As `_whole_manifest`. Raises ObjectNotFoundError, ObjectCorruptError or ContractError."""
    manifest = Manifest.from_json(storage.read(manifest_uri(root_uri, step)))
    for entry in manifest.objects:
        _verify(storage, step_dir_uri(root_uri, step), entry)
    return manifest


def _verify(storage: Storage, directory_uri: str, entry: CheckpointObject) -> None:
    uri = join(directory_uri, entry.name)
    info = storage.stat(uri)
    if info is None:
        raise ObjectNotFoundError(f"{uri} is missing, but the manifest names it")
    found = (info.generation, info.size, info.crc32c)
    expected = (entry.generation, entry.size, entry.crc32c)
    if found != expected:
        raise ObjectCorruptError(
            f"{uri} is not the object that was written: expected generation, size and crc32c {expected}, "
            f"found {found}"
        )


def _written_part(state: State, manifest: Manifest) -> State:
    """What of a state a checkpoint can fill: a run in fp16 that continues one in another precision keeps its own scale."""
    was_scaled = manifest.config.get("engine", {}).get("precision") == "fp16"
    return {name: part for name, part in state.items() if name != "loss_scale" or was_scaled}


def _evaluated_as(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be the same for two evaluations to compare."""
    data: Mapping[str, Any] = {**to_dict(DataConfig()), **config.get("data", {})}
    evaluation: Mapping[str, Any] = {**to_dict(EvaluationConfig()), **config.get("evaluation", {})}
    samples = (data["uri"], data["source"], data["options"], data["seq_len"], evaluation["max_samples"])
    return (evaluation["metric"], *samples)


def _require_same_model(manifest: Manifest, config: JobConfig, uri: str) -> None:
    written: Mapping[str, Any] = {**to_dict(ModelConfig()), **manifest.config.get("model", {})}
    wanted: Mapping[str, Any] = to_dict(config.model)
    other = [
        f"model.{name} = {written.get(name)!r} (here {wanted[name]!r})"
        for name in wanted
        if written.get(name) != wanted[name] and name != "dropout"
    ]
    if other:
        raise CheckpointError(
            f"{uri} was written by a model of another shape: {', '.join(other)}. "
            "Give the same model, or another checkpoint root."
        )


def _require_same_optimizer(manifest: Manifest, config: JobConfig, uri: str) -> None:
    """Its state is another: AdamW has two moments, SGD one or none."""
    written = {**to_dict(OptimConfig()), **manifest.config.get("optim", {})}
    if (written["name"], written["momentum"] > 0) != (config.optim.name, config.optim.momentum > 0):
        raise CheckpointError(
            f"{uri} has the state of optim.name = {written['name']!r} with momentum {written['momentum']}, and this run "
            f"has {config.optim.name!r} with momentum {config.optim.momentum}. Give the same optimizer, or begin anew "
            "with another checkpoint root."
        )


def _require_same_tokenizer(manifest: Manifest, sha256: str, dataset_uri: str, uri: str) -> None:
    earlier_uri = manifest.config.get("data", {}).get("uri", "")
    if manifest.tokenizer_sha256 != sha256:
        raise CheckpointError(
            f"{uri} was trained with another tokenizer: its sha256 is {manifest.tokenizer_sha256} (of the dataset "
            f"{earlier_uri}), that of {dataset_uri} is {sha256}. The same ids would mean other text. Stage the data with "
            f"tokenizer_uri = {join(earlier_uri, TOKENIZER_NAME)}, or begin anew with another checkpoint root."
        )
    if earlier_uri != dataset_uri:
        logger.info("continuing on other data of the same tokenizer: %s after %s", dataset_uri, earlier_uri)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())


def _versions(config: JobConfig) -> dict[str, str]:
    packages = ["torch", "penstock", *(["deepspeed"] if config.engine.strategy.startswith("zero") else [])]
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
