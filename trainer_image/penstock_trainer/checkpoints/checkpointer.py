"""Saves of a run: a copy in host memory that stalls the step, then written and committed while training goes on.

A step becomes a checkpoint with its manifest, which rank 0's writer commits after every rank's objects. What a writer left
behind that did not get so far is never read. The layout is penstock_trainer.contract.checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock_trainer.checkpoints.host_buffer import HostBuffer
from penstock_trainer.checkpoints.local_root import LocalRoot
from penstock_trainer.checkpoints.ownership import check_ownership
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.checkpoints.save_plan import plan_save
from penstock_trainer.checkpoints.saver import Group, Save, Saver
from penstock_trainer.checkpoints.writer import Setup, failure_of
from penstock_trainer.checkpoints.writer_process import error_of
from penstock_trainer.contract.checkpoint import FORMAT_VERSION, Owner
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.fields import to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.storage import storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.5
"""Between two questions to all ranks while they wait."""


class Checkpointer:
    """The one writer below a checkpoint root, as long as `owner` is what owner.json says.

    Construction is collective: what is written where is planned for `state`, its buffer is allocated and touched, and the
    writer processes start. With a `local_root` each save goes to the nodes' own disks first, where it is a
    checkpoint for these nodes alone, and from there to the root if it is due there.
    """

    def __init__(
        self,
        root_uri: str,
        owner: Owner,
        config: JobConfig,
        world: World,
        state: State,
        *,
        tokenizer_sha256: str,
        local_root: LocalRoot | None = None,
    ) -> None:
        self.root_uri = root_uri.rstrip("/")
        self.owner = owner
        self._config = config
        self._tokenizer_sha256 = tokenizer_sha256
        self._world = world
        self._plan = plan_save(state, world, per_node=local_root is not None)
        self._buffer = HostBuffer(self._plan.layout.nbytes)
        self._local_root = local_root
        self._root = self._root_saver()
        self._local = self._local_saver(local_root) if local_root else None
        self._saves: Counter[int] = Counter()
        self._uploaded_step: int | None = None

    def save(
        self,
        progress: Progress,
        state: State,
        *,
        before_commit: Callable[[], None] | None = None,
        to_root: bool = True,
    ) -> float:
        """Copy `state`, which has the tensors that were planned for, and have it written; seconds that the copy took.

        Only when not busy and, with `to_root`, not uploading. Not collective, but all ranks save the same steps. `before_commit`
        runs on rank 0, in another thread, once all is written: what must be in storage before the step counts. Without
        `to_root` the save stays on the nodes' disks, if there are any to go to.
        """
        began = time.perf_counter()
        self._plan.fill(state, self._buffer.tensor)
        self._first.begin(self._save_of(progress, before_commit, to_root=to_root or self._local is None))
        return time.perf_counter() - began

    @property
    def is_busy(self) -> bool:
        """Whether the buffer of this rank is still being written."""
        return self._first.is_busy

    @property
    def is_uploading(self) -> bool:
        """Whether a save that goes to the root is under way on this rank."""
        return self._root.is_busy

    def wait(self, *, is_told_to_stop: Callable[[], bool]) -> bool:
        """Until no save is under way on any rank, or until a rank is told to stop: False then.

        Collective; blocks. Raises as `raise_together`; what another try may mend is no error here.
        """
        while True:
            is_idle = all(saver.wait(_ASK_SECONDS) for saver in self._savers)
            answers = self._world.gather((is_idle, self.has_failed, is_told_to_stop()))
            if any(is_told for _, _, is_told in answers):
                return False
            if self._is_over(answers):
                self.raise_together()
                return True

    @property
    def has_failed(self) -> bool:
        """Whether no further save of this rank makes sense: `raise_together` tells why."""
        return any(saver.failure is not None for saver in self._savers)

    def raise_together(self) -> None:
        """Raise on all ranks what any of them has failed with for good. Collective.

        FencedError, StorageError or CheckpointError; nothing when none has.
        """
        self._raise_first([saver.failure for saver in self._savers])

    def finish(self, timeout_seconds: float | None = None, *, must_be_saved: bool = True) -> bool:
        """Wait until the last save is a checkpoint; whether all ranks were in time. Collective; blocks.

        Raises on all ranks what it failed with on any: as `raise_together`, and StorageUnavailableError when storage
        would not take it, unless it need not be saved.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            is_idle = all(
                saver.wait(max(0.0, min(_ASK_SECONDS, deadline - time.monotonic()))) for saver in self._savers
            )
            answers = self._world.gather((is_idle, self.has_failed, time.monotonic() >= deadline))
            if self._is_over(answers) or all(is_late for _, _, is_late in answers):
                break
        failed = [saver.last_error if must_be_saved else saver.failure for saver in self._savers]
        self._raise_first(failed)
        return all(is_idle for is_idle, _, _ in answers)

    def committed(self) -> list[tuple[int, float]]:
        """Steps that became checkpoints of the root since the last call, and the seconds from each save's begin. On rank 0."""
        return self._root.take_committed()

    @property
    def last_seconds(self) -> float:
        """From the begin of the last save that became a checkpoint of the root until it was one; 0 before there is one.

        On rank 0.
        """
        return self._root.last_seconds

    def check_owner(self) -> None:
        """Raise FencedError unless this attempt still owns the root. Not collective: blocks on storage alone."""
        check_ownership(self.root_uri, self.owner, storage_for(self.root_uri))

    def close(self, timeout_seconds: float = 60.0, *, peers_lost: bool = False) -> None:
        """Give the writers so long to end what they do, and give the buffer back. Not collective; blocks.

        With `peers_lost` a save that lacks other ranks' parts is given up.
        """
        have_ended = [saver.close(timeout_seconds, peers_lost=peers_lost) for saver in self._savers]
        if all(have_ended):
            self._buffer.close()

    @property
    def _first(self) -> Saver:
        return self._local or self._root

    @property
    def _savers(self) -> list[Saver]:
        """In the order in which a save goes through them."""
        return [self._local, self._root] if self._local else [self._root]

    def _root_saver(self) -> Saver:
        env, kept = self._world.env, self._config.checkpoint
        setup = Setup(
            root_uri=self.root_uri,
            owner=self.owner,
            objects=self._plan.layout.objects,
            source_dir=str(self._local_root.path) if self._local_root else "",
            tensors=self._plan.tensors if env.is_primary else {},
            retention=Retention(last=kept.keep_last, every=kept.keep_every, best=kept.keep_best),
        )
        group = Group(name="root", ranks=range(env.world_size), rank=env.rank)
        return Saver(setup, self._buffer.fileno, self._world, group)

    def _local_saver(self, local_root: LocalRoot) -> Saver:
        env = self._world.env
        first = env.rank - env.local_rank
        layout = self._plan.layout
        setup = Setup(
            root_uri=local_root.uri,
            owner=self.owner,
            asks_owner=False,
            objects=(*layout.objects, *layout.node_objects),
            tensors=self._plan.tensors,
            # The one before may still be on its way to the root.
            retention=Retention(last=2, every=0, best=False),
        )
        group = Group(name=f"node-{first}", ranks=range(first, first + env.local_world_size), rank=env.rank)
        return Saver(setup, self._buffer.fileno, self._world, group, on_written=self._pass_on)

    def _pass_on(self, save: Save) -> None:
        """From this node's disk to the root, if it is due there; its files are whole."""
        if save.to_root:
            self._root.begin(save)

    @staticmethod
    def _is_over(answers: Sequence[tuple[bool, bool, bool]]) -> bool:
        """Of (idle, failed, _) by rank: whether nobody waits any more, or one will never have what others wait for."""
        return all(is_idle for is_idle, _, _ in answers) or any(has_failed for _, has_failed, _ in answers)

    def _raise_first(self, errors: Sequence[Exception | None]) -> None:
        mine = next((error for error in errors if error is not None), None)
        for failure in self._world.gather(failure_of(mine) if mine else None):
            if failure is not None:
                raise error_of(failure) from mine

    def _save_of(
        self, progress: Progress, before_commit: Callable[[], None] | None, *, to_root: bool
    ) -> Save:
        count = self._saves[progress.step]
        self._saves[progress.step] += 1
        # A step that comes again after a roll-back: the objects of its standing manifest are left alone.
        directory = f"{self.owner.attempt}-{count}" if count else self.owner.attempt
        return Save(
            step=progress.step,
            directory=directory,
            manifest=self._manifest(progress),
            before_commit=before_commit,
            to_root=to_root,
            keep=self._kept_for_upload(progress.step, to_root=to_root),
        )

    def _kept_for_upload(self, step: int, *, to_root: bool) -> list[int]:
        """The step whose files a rank of this node may still be sending to the root."""
        kept = [] if self._uploaded_step is None else [self._uploaded_step]
        if to_root:
            self._uploaded_step = step
        return kept

    def _manifest(self, progress: Progress) -> Mapping[str, Any]:
        """What of the manifest is known before anything is written."""
        return {
            "format_version": FORMAT_VERSION,
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "tokens_seen": progress.tokens_seen,
            "best": to_dict(progress.best),
            "stale_evaluations": progress.stale_evaluations,
            "config": json.loads(self._config.to_json()),
            "config_hash": self._config.hash,
            "tokenizer_sha256": self._tokenizer_sha256,
            "strategy": self._config.engine.strategy,
            "world_size": self._world.env.world_size,
            "versions": _versions(self._config),
            "attempt": self.owner.attempt,
            "fencing_token": self.owner.fencing_token,
        }


def _versions(config: JobConfig) -> dict[str, str]:
    packages = ["torch", "penstock", *(["deepspeed"] if config.engine.strategy.startswith("zero") else [])]
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
