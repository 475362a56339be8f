"""From which checkpoint a run continues, and whether it may."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.checkpoints.local_root import LocalRoot
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.reader import ObjectReader
from penstock_trainer.contract.checkpoint import Manifest, step_dir_uri
from penstock_trainer.contract.config import (
    DataConfig,
    EvaluationConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
)
from penstock_trainer.contract.dataset import TOKENIZER_NAME
from penstock_trainer.contract.fields import ContractError, UnknownFormatError, to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.engines.flat_shard import FlatShard
from penstock_trainer.errors import CheckpointError
from penstock_trainer.storage import ObjectCorruptError, ObjectNotFoundError, Storage, StorageError, join
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_WITHOUT_BEST = "Restore it, or set evaluation.export_best to false to export the weights of the last step."


class Restorer:
    """Reads the checkpoints of a root, and of resume_from. Every method is collective."""

    def __init__(
        self,
        root_uri: str,
        config: JobConfig,
        world: World,
        *,
        tokenizer_sha256: str,
        storage: Storage | None = None,
        local_root: LocalRoot | None = None,
    ) -> None:
        """`local_root`: where the nodes keep saves of their own, see CheckpointConfig.local_dir."""
        self._root = CheckpointRoot(root_uri, storage)
        self._local_root = local_root
        self._is_partly_filled = False
        self.restored_locally: int | None = None
        """The step that was restored from the nodes' own disks, if it was: the root may not have it."""
        self._config = config
        self._tokenizer_sha256 = tokenizer_sha256
        self._world = world

    def restore(self, state: State) -> Progress | None:
        """Fill `state` from the newest whole checkpoint, of this root or else of resume_from; None when there is none.

        One with a missing or corrupt part is named in the log and the one before is taken. Raises CheckpointError when
        there are checkpoints and none is whole, when a newer penstock has written one that would be continued from, when resume_from is needed and has none, when the model's shape or the
        tokenizer is another, when a value is not finite, and when the checkpoint is further than the run goes: beyond the
        last step, or for resume_from at it, as nothing would be trained then.
        """
        progress = self._restore_locally(state) or self._restore_from(self._root, state)
        if progress is None and self._is_partly_filled:
            raise CheckpointError(
                "the saves on the nodes' own disks broke while they were read, and there is no other checkpoint. See the "
                "log. Leave checkpoint.local_dir empty, or name another directory, to begin anew."
            )
        earlier = self._config.checkpoint.resume_from
        if progress is None and earlier:
            progress = self._restore_from(CheckpointRoot(earlier), state)
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
        if not self._fill(state, manifest, CheckpointRoot(root_uri)):
            raise CheckpointError(
                f"the checkpoint of step {step} below {root_uri} broke while it was read. See the log. {_WITHOUT_BEST}"
            )
        return self._progress_of(manifest), step_dir_uri(root_uri, step)

    def _restore_locally(self, state: State) -> Progress | None:
        """From the nodes' own disks, where every node has a later save than the root."""
        if self._local_root is None:
            return None
        manifest = self._local_root.newest_on_all_nodes(self._config, self._world)
        newest = self._world.from_primary(lambda: next((one.step for one in self._root.whole_steps()), 0))
        if manifest is None or manifest.step <= newest:
            return None
        root = CheckpointRoot(self._local_root.uri)
        self._require_continuable(manifest, root.uri)
        if not self._fill(state, manifest, root):
            self._is_partly_filled = True
            return None
        self._require_finite(state, manifest, root.uri)
        self.restored_locally = manifest.step
        logger.info("continuing from step %d on the nodes' own disks (%s)", manifest.step, root.uri)
        return self._progress_of(manifest)

    def _restore_from(self, root: CheckpointRoot, state: State) -> Progress | None:
        damaged = []
        for step in self._world.from_primary(root.steps):
            manifest = self._world.from_primary(partial(root.whole_or_none, step))
            if manifest is None:
                if self._world.from_primary(partial(_is_damaged, root, step)):
                    damaged.append(step)
                continue
            self._require_continuable(manifest, root.uri)
            if self._fill(state, manifest, root):
                self._require_finite(state, manifest, root.uri)
                logger.info("continuing from step %d of %s", manifest.step, root.uri)
                return self._progress_of(manifest)
            logger.warning("falling back to the checkpoint before step %d", step)
            damaged.append(step)
        if damaged:
            raise CheckpointError(
                f"of the checkpoints below {root.uri} none can be read: steps {', '.join(map(str, damaged))} are damaged "
                "(the log names what of them). Nothing was deleted. Restore what is missing, or give another checkpoint "
                "root to begin anew."
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
        if manifest.step == steps and root_uri == self._config.checkpoint.resume_from.rstrip("/"):
            raise CheckpointError(
                f"checkpoint.resume_from = {root_uri!r} is at step {manifest.step} and the run ends at steps = {steps}, "
                f"which counts the steps before it too: nothing would be trained. Raise steps above {manifest.step}."
            )

    def _find(self, step: int) -> tuple[Manifest, str]:
        """The whole manifest of a step, and the root that it lies in. Not collective."""
        reasons = []
        for root_uri in filter(None, (self._root.uri, self._config.checkpoint.resume_from)):
            try:
                return CheckpointRoot(root_uri).whole(step), root_uri.rstrip("/")
            except (ObjectNotFoundError, ObjectCorruptError, ContractError) as exc:
                reasons.append(f"below {root_uri}: {exc}")
        raise CheckpointError(
            f"the checkpoint of step {step} is gone or damaged: {'; '.join(reasons)}. {_WITHOUT_BEST}"
        )

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

    def _fill(self, state: State, manifest: Manifest, root: CheckpointRoot) -> bool:
        """Whether all of it could be read. Ranks agree: the planner gathers their errors."""
        reader = ObjectReader(root.storage, step_dir_uri(root.uri, manifest.step), manifest)
        state = _written_part(state, manifest)
        try:
            dcp_load(state, storage_reader=reader, process_group=self._world.control)
        except CheckpointException as exc:  # not an Exception
            errors = [error for error, _ in exc.failures.values()]
            if not all(isinstance(error, (StorageError, ContractError)) for error in errors):
                raise CheckpointError(f"reading the checkpoint failed: {_reasons(exc)}") from exc
            logger.warning("reading step %d of %s failed: %s", manifest.step, root.uri, _reasons(exc))
            return False
        return True

    def _require_finite(self, state: State, manifest: Manifest, root_uri: str) -> None:
        """Nothing can be trained from a state with infinities, and what led to it is in the checkpoint for good."""
        mine = [name for name, tensor in _tensors(state) if not torch.isfinite(_held(tensor)).all()]
        found = sorted({name for names in self._world.gather(mine) for name in names})
        if found:
            raise CheckpointError(
                f"{step_dir_uri(root_uri, manifest.step)} has values that are not finite, in {', '.join(found[:5])}"
                f"{' and others' if len(found) > 5 else ''}. Nothing was deleted. Move that step directory away to continue "
                "from the step before, or begin anew with another checkpoint root."
            )


def _is_damaged(root: CheckpointRoot, step: int) -> bool:
    """Whether a step that is not whole was a checkpoint. Raises CheckpointError for one of a newer penstock's."""
    try:
        root.manifest(step)
    except ObjectNotFoundError:
        return False
    except UnknownFormatError as exc:  # going on from the one before would write over it
        raise CheckpointError(
            f"{step_dir_uri(root.uri, step)} cannot be continued from: {exc} Nothing was deleted; to begin anew, give "
            "another checkpoint root."
        ) from exc
    except (ObjectCorruptError, ContractError):
        return True
    return True


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Those of floating point, by their dotted names."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield f"{prefix}{name}", value


def _held(tensor: Tensor) -> Tensor:
    """What of it lies on this rank."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.flat if isinstance(tensor, FlatShard) else tensor


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
