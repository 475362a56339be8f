"""Saves of a run: a copy in host memory that stalls the step, then written and committed while training goes on.

A step becomes a checkpoint with its manifest, which rank 0's writer commits after every rank's objects. What a writer left
behind that did not get so far is never read. The layout is penstock_trainer.contract.checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from penstock_trainer.checkpoints.host_buffer import HostBuffer
from penstock_trainer.checkpoints.ownership import check_ownership
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.retention import Retention
from penstock_trainer.checkpoints.save_plan import plan_save
from penstock_trainer.checkpoints.saver import Save, Saver
from penstock_trainer.checkpoints.writer import Setup, failure_of
from penstock_trainer.checkpoints.writer_process import error_of
from penstock_trainer.contract.checkpoint import FORMAT_VERSION, Owner
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.fields import to_dict
from penstock_trainer.engines.engine import State
from penstock_trainer.storage import storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


class Checkpointer:
    """The one writer below a checkpoint root, as long as `owner` is what owner.json says.

    Construction is collective: what is written where is planned for `state`, its buffer is allocated and touched, and the
    writer process starts.
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
    ) -> None:
        self.root_uri = root_uri.rstrip("/")
        self.owner = owner
        self._config = config
        self._tokenizer_sha256 = tokenizer_sha256
        self._world = world
        self._plan = plan_save(state, world)
        self._buffer = HostBuffer(self._plan.layout.nbytes)
        kept = config.checkpoint
        setup = Setup(
            root_uri=self.root_uri,
            owner=owner,
            rank=world.env.rank,
            layout=self._plan.layout,
            tensors=self._plan.tensors,
            retention=Retention(last=kept.keep_last, every=kept.keep_every),
        )
        self._saver = Saver(setup, self._buffer.fileno, world)
        self._saves: Counter[int] = Counter()

    def save(
        self, progress: Progress, state: State, *, before_commit: Callable[[], None] | None = None
    ) -> float:
        """Copy `state`, which has the tensors that were planned for, and have it written; seconds that this has blocked.

        A save that is still under way is waited for. Not collective, but all ranks save the same steps. `before_commit`
        runs on rank 0, in another thread, once all is written: what must be in storage before the step counts.
        """
        began = time.perf_counter()
        if self._saver.is_busy:
            logger.info("the save of step %d waits for the one before it", progress.step)
        self._saver.wait()
        self._plan.fill(state, self._buffer.tensor)
        self._saver.begin(self._save_of(progress, before_commit))
        return time.perf_counter() - began

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._saver.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether no further save of this rank makes sense: `raise_together` tells why."""
        return self._saver.failure is not None

    def raise_together(self) -> None:
        """Raise on all ranks what any of them has failed with for good. Collective.

        FencedError, StorageError or CheckpointError; nothing when none has.
        """
        self._raise_first(self._saver.failure)

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the last save is a checkpoint; whether all ranks were in time. Collective; blocks.

        Raises on all ranks what it failed with on any: as `raise_together`, and StorageUnavailableError when storage
        would not take it.
        """
        is_idle = self._saver.wait(timeout_seconds)
        self._raise_first(self._saver.last_error)
        return all(self._world.gather(is_idle))

    def committed(self) -> list[tuple[int, float]]:
        """Steps that became checkpoints since the last call, and the seconds from each save's begin. On rank 0."""
        return self._saver.take_committed()

    @property
    def last_seconds(self) -> float:
        """From the begin of the last save that became a checkpoint until it was one; 0 before there is one. On rank 0."""
        return self._saver.last_seconds

    def check_owner(self) -> None:
        """Raise FencedError unless this attempt still owns the root. Not collective: blocks on storage alone."""
        check_ownership(self.root_uri, self.owner, storage_for(self.root_uri))

    def close(self, timeout_seconds: float = 60.0) -> None:
        """Give the writer so long to end what it does, and give the buffer back. Not collective; blocks."""
        self._saver.close(timeout_seconds)
        self._buffer.close()

    def _raise_first(self, error: Exception | None) -> None:
        failures = self._world.gather(failure_of(error) if error else None)
        for failure in failures:
            if failure is not None:
                raise error_of(failure) from error

    def _save_of(self, progress: Progress, before_commit: Callable[[], None] | None) -> Save:
        count = self._saves[progress.step]
        self._saves[progress.step] += 1
        # A step that comes again after a roll-back: the objects of its standing manifest are left alone.
        directory = f"{self.owner.attempt}-{count}" if count else self.owner.attempt
        return Save(
            step=progress.step,
            directory=directory,
            manifest=self._manifest(progress) if self._world.env.is_primary else {},
            before_commit=before_commit,
        )

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
