"""How a step becomes a checkpoint: the index, then the manifest, by the one attempt that owns the root; and what is then
no longer needed. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.checkpoints.layout import TensorInfo
from penstock_trainer.checkpoints.ownership import replace_as_owner
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    Owner,
    manifest_uri,
    step_dir_uri,
)
from penstock_trainer.contract.fields import ContractError, canonical_json, from_dict, to_dict
from penstock_trainer.errors import FencedError
from penstock_trainer.storage import (
    Buffer,
    ObjectCorruptError,
    ObjectNotFoundError,
    Storage,
    StorageError,
    join,
)

logger = logging.getLogger(__name__)


def write_object(
    storage: Storage,
    directory_uri: str,
    name: str,
    data: Buffer,
    content_type: str,
    *,
    if_generation_match: int | None = None,
) -> CheckpointObject:
    """Write one object below `directory_uri` and describe it. Raises StorageError, see Storage.write."""
    info = storage.write(
        join(directory_uri, name), data, if_generation_match=if_generation_match, content_type=content_type
    )
    return CheckpointObject(
        name=name,
        generation=info.generation,
        size=info.size,
        crc32c=info.crc32c,
        sha256=hashlib.sha256(data).hexdigest(),
    )


class Committer:
    """The hand of the one rank that commits below a root. Every method blocks on storage.

    `check_owner` raises FencedError when another attempt has taken the run over.
    """

    def __init__(
        self,
        root_uri: str,
        owner: Owner,
        storage: Storage,
        *,
        check_owner: Callable[[], None],
        tensors: Mapping[str, TensorInfo],
        retention: Retention,
    ) -> None:
        self._root = CheckpointRoot(root_uri, storage)
        self._owner = owner
        self._storage = storage
        self._check_owner = check_owner
        self._tensors = tensors
        self._retention = retention
        self._newest: Manifest | None = None
        self._known: dict[int, bool] = {}
        """Whether a step is a whole checkpoint, of those that were looked at."""

    def commit(
        self, manifest: Mapping[str, Any], directory: str, receipts: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        """Write index and manifest of a save that all ranks have written.

        `manifest` has the fields that the trainer knows; `receipts` are the ranks' as JSON types. Once it is a checkpoint,
        another call changes nothing: the first one's answer may have been lost. Raises FencedError when the root has
        another owner, StorageError and ContractError.
        """
        index_name = f"{directory}/index.json"
        complete = self._standing(manifest["step"], index_name)
        if complete is None:
            complete = self._write(manifest, index_name, receipts)
            self._publish(complete)
        self._newest = complete
        self._known[complete.step] = True
        return complete

    def prune(self, keep: Collection[int] = (), *, is_asked: Callable[[], bool] = lambda: False) -> None:
        """Delete checkpoints that need not be kept, if one was committed. What cannot be deleted is logged and left.

        The steps of `keep` are left too, and for the next call what is left when `is_asked` says that a save waits.
        """
        if self._newest is None:
            return
        best = self._newest.best.step if self._newest.best else None
        try:
            dropped = self._retention.dropped(self._committed(self._newest.step), best=best)
        except StorageError as exc:
            logger.warning("old checkpoints are left where they are: %s", exc)
            return
        for step in dropped:
            if is_asked():
                return
            if step not in keep:
                self._drop(step)

    def _drop(self, step: int) -> None:
        try:
            self._root.delete(self._root.manifest(step))
        except ObjectNotFoundError:
            pass  # deleted before, but for objects that could not be
        except (StorageError, ContractError) as exc:
            logger.warning("an old checkpoint is left where it is: %s", exc)
            return
        else:
            logger.info("deleted the checkpoint of step %d", step)
        del self._known[step]

    def _standing(self, step: int, index_name: str) -> Manifest | None:
        """The manifest of the step if it names that index, which no other save writes. To write it anew would damage it."""
        try:
            manifest = self._root.manifest(step)
        except (ObjectNotFoundError, ObjectCorruptError, ContractError):
            return None
        return manifest if manifest.index == index_name else None

    def _write(
        self, manifest: Mapping[str, Any], index_name: str, receipts: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        """The index; what makes the step a checkpoint once it is published."""
        index = write_object(
            self._storage,
            step_dir_uri(self._root.uri, manifest["step"]),
            index_name,
            canonical_json({"tensors": self._index(receipts)}).encode(),
            "application/json",
        )
        objects = [entry for told in receipts for entry in told["objects"]]
        return from_dict(
            Manifest,
            {**manifest, "index": index.name, "objects": [*objects, to_dict(index)], "saved_at": time.time()},
        )

    def _committed(self, newest: int) -> list[int]:
        """Steps up to the newest that are checkpoints as storage describes them. Later ones were not continued from.

        A damaged one is no checkpoint to fall back to: it is not counted, and not deleted either.
        """
        steps = [step for step in self._root.steps() if step <= newest]
        for step in steps:
            if step not in self._known:
                self._known[step] = self._root.state(step, checksums=False).condition == "whole"
        return [step for step in steps if self._known[step]]

    def _index(self, receipts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        chunks: dict[str, list[Any]] = defaultdict(list)
        for told in receipts:
            for fqn, of_rank in told["chunks"].items():
                chunks[fqn] += of_rank
        return {
            fqn: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks[fqn]}
            for fqn, tensor in self._tensors.items()
        }

    def _publish(self, manifest: Manifest) -> None:
        """Make the step a checkpoint.

        What stands there already is damaged, or was committed late by an attempt before this one: otherwise this run
        would have continued from it. It is replaced.
        """
        uri = manifest_uri(self._root.uri, manifest.step)
        data = manifest.to_json().encode()

        def check() -> None:
            self._check_owner()
            _require_no_newer(self._storage, uri, self._owner)

        replace_as_owner(
            self._storage,
            uri,
            check,
            lambda generation: self._storage.write(
                uri, data, if_generation_match=generation, content_type="application/json"
            ),
        )


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
