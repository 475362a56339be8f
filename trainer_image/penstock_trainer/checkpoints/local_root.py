"""Checkpoints on the nodes' own disks: each node has what its own ranks hold, and nothing of the others.

Good for one thing: ranks that are started again on the same nodes continue from there, without storage and without
losing the steps since the last upload. So they count only when every node has the same save, of the same ranks.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_trainer.checkpoint_root import CheckpointRoot, find_leftovers, remove_leftovers
from penstock_trainer.contract.checkpoint import Manifest, Owner
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import StorageError
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LocalSave:
    """What tells a save from others of the same step."""

    step: int
    attempt: str
    index: str


class LocalRoot:
    """Of one run, on the disk of this node."""

    def __init__(self, local_dir: str, root_uri: str, owner: Owner) -> None:
        """`local_dir` may be used by other runs too; they have other roots."""
        self.path = Path(local_dir) / hashlib.sha256(root_uri.rstrip("/").encode()).hexdigest()[:16]
        self.uri = self.path.as_uri()
        self._owner = owner

    def newest_on_all_nodes(self, config: JobConfig, world: World) -> Manifest | None:
        """This node's manifest of the newest save that is whole on every node; None when there is none. Collective.

        Passed over is what other ranks or another strategy wrote, of which a node may lack what its ranks hold now, and
        what is of no attempt before this one. What is of an attempt that this one's root does not know is deleted with all
        the rest: the root was begun anew since. What cannot be read is logged.
        """
        manifests = self._whole()
        is_outdated = any(self._is_unknown(manifest) for manifest in manifests)
        found = {} if is_outdated else self._usable(manifests, config, world.env)
        common = set.intersection(*(set(saves) for saves in world.gather(list(found))))
        if world.env.local_rank == 0:  # all ranks have looked
            if is_outdated:
                logger.info("deleting the checkpoints in %s: their root was begun anew", self.path)
                self.remove()
            self._remove_leftovers()
        return found[max(common, key=lambda save: save.step)] if common else None

    def remove(self) -> None:
        """All of it: the run is over, and its last checkpoint is in the root."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Of saves that were cut off: nobody else writes here, and the disk would fill up."""
        root = CheckpointRoot(self.uri)
        try:
            remove_leftovers(root, find_leftovers(root, min_age_seconds=0.0, is_finished=True))
        except StorageError as exc:
            logger.warning("leftovers on this node's disk cannot be deleted: %s", exc)

    def _whole(self) -> Sequence[Manifest]:
        """By sizes and times: the reader verifies each chunk that it reads."""
        root = CheckpointRoot(self.uri)
        try:
            states = [root.state(step, checksums=False) for step in root.steps()]
            for finding in (finding for state in states for finding in state.findings):
                logger.warning("passed over on this node's disk: %s", finding)
            return [state.manifest for state in states if state.condition == "whole" and state.manifest]
        except StorageError as exc:
            logger.warning("the checkpoints on this node's disk cannot be read: %s", exc)
            return []

    def _is_unknown(self, manifest: Manifest) -> bool:
        """Whether the token was not given yet when this attempt got its own, of the root as it is now."""
        return manifest.fencing_token >= self._owner.fencing_token and manifest.attempt != self._owner.attempt

    def _usable(
        self, manifests: Sequence[Manifest], config: JobConfig, env: RankEnv
    ) -> Mapping[_LocalSave, Manifest]:
        written_as = (config.engine.strategy, env.world_size, config.hash)
        first = env.rank - env.local_rank
        of_this_node = set(range(first, first + env.local_world_size))
        return {
            _LocalSave(manifest.step, manifest.attempt, manifest.index): manifest
            for manifest in manifests
            if (manifest.strategy, manifest.world_size, manifest.config_hash) == written_as
            and manifest.fencing_token < self._owner.fencing_token
            and _writers_of(manifest) <= of_this_node
        }


def _writers_of(manifest: Manifest) -> set[int]:
    """Ranks whose objects it names: nodes may have changed their places since."""
    names = (entry.name.rpartition("/")[2] for entry in manifest.objects if entry.name != manifest.index)
    return {int(name.partition("-")[0]) for name in names}
