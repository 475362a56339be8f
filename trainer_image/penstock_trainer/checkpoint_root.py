"""A checkpoint root as anybody sees it: which steps there are, which are whole, and what is left over.

Beside the contract and storage the only part of the trainer that components and pipelines use. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    manifest_uri,
    step_dir_uri,
    step_of,
)
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import (
    ObjectCorruptError,
    ObjectNotFoundError,
    Storage,
    join,
    storage_for,
)

logger = logging.getLogger(__name__)


class CheckpointRoot:
    """The step directories below one URI. Every method blocks on storage and raises StorageError."""

    def __init__(self, uri: str, storage: Storage | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.storage = storage or storage_for(uri)

    def steps(self) -> list[int]:
        """Steps that have a directory, newest first; not each is a checkpoint."""
        found = (step_of(uri) for uri in self.storage.list_dirs(self.uri))
        return sorted((step for step in found if step is not None), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """What makes the step a checkpoint. Raises ObjectNotFoundError, and ContractError when it is no manifest."""
        return Manifest.from_json(self.storage.read(manifest_uri(self.uri, step)))

    def whole(self, step: int) -> Manifest:
        """The manifest, once every object that it names was found to be the one that was written.

        As storage describes objects: no payload is read from Cloud Storage. Raises ObjectNotFoundError,
        ObjectCorruptError or ContractError.
        """
        manifest = self.manifest(step)
        for entry in manifest.objects:
            self._require_standing(step, entry)
        return manifest

    def whole_steps(self) -> Iterator[Manifest]:
        """Checkpoints that are whole, newest first; of one that is not, the log names the part and the reason."""
        for step in self.steps():
            manifest = self.whole_or_none(step)
            if manifest is not None:
                yield manifest

    def whole_or_none(self, step: int) -> Manifest | None:
        """As `whole`; None for a step that is not, whose damaged part is named in the log."""
        uri = manifest_uri(self.uri, step)
        try:
            return self.whole(step)
        except ObjectNotFoundError as exc:
            if self.storage.stat(uri) is None:
                logger.info("%s passed over: it was not saved to its end", step_dir_uri(self.uri, step))
            else:
                logger.warning("%s; falling back to the checkpoint before step %d", exc, step)
        except (ObjectCorruptError, ContractError) as exc:
            logger.warning("%s: %s; falling back to the checkpoint before step %d", uri, exc, step)
        return None

    def delete(self, manifest: Manifest) -> None:
        """Remove a checkpoint: its manifest first, so that no reader finds half of it. What is gone already is no error."""
        directory = step_dir_uri(self.uri, manifest.step)
        uris = [manifest_uri(self.uri, manifest.step)]
        uris += [join(directory, entry.name) for entry in manifest.objects]
        for uri in uris:
            try:
                self.storage.delete(uri)
            except ObjectNotFoundError:
                continue

    def _require_standing(self, step: int, entry: CheckpointObject) -> None:
        uri = join(step_dir_uri(self.uri, step), entry.name)
        info = self.storage.stat(uri)
        if info is None:
            raise ObjectNotFoundError(f"{uri} is missing, but the manifest names it")
        found = (info.generation, info.size, info.crc32c)
        expected = (entry.generation, entry.size, entry.crc32c)
        if found != expected:
            raise ObjectCorruptError(
                f"{uri} is not the object that was written: expected generation, size and crc32c {expected}, "
                f"found {found}"
            )
