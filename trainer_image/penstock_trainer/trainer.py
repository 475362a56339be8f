"""A training run on one rank, from the newest checkpoint to the last step and the export."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from dataclasses import dataclass, replace

import torch

from penstock_trainer.checkpoint import Checkpointer, Progress, Snapshot
from penstock_trainer.contract.checkpoint import CheckpointObject, Owner, step_dir_uri
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.contract.export import FORMAT_VERSION, ExportManifest
from penstock_trainer.data import open_data
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.samples import LocalStep
from penstock_trainer.engines import build_engine
from penstock_trainer.errors import BatchError, DivergedError
from penstock_trainer.export import write_export
from penstock_trainer.guard import Guard, Judgement
from penstock_trainer.loader import Loader
from penstock_trainer.metrics import MetricsLog
from penstock_trainer.model.build import build_model
from penstock_trainer.model.objective import Objective
from penstock_trainer.optim import learning_rate
from penstock_trainer.outcome import Outcome
from penstock_trainer.ownership import take_ownership
from penstock_trainer.preemption import Preemption
from penstock_trainer.storage import storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What follows a step. Alike on all ranks."""

    stop: bool
    """A rank was told to stop."""
    log: bool
    save: bool

    @property
    def judgement(self) -> bool:
        """Whether the step has to be judged first: no run can continue from a state that has diverged."""
        return self.log or self.save


class Trainer:
    """A run on this rank, from the newest checkpoint on. Construction is collective and reads data and checkpoint."""

    def __init__(self, config: JobConfig, world: World, preemption: Preemption) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.world = world
        self.preemption = preemption
        self.batch = BatchPlan.of(config, world.env.world_size)
        self.data = open_data(config, world)
        self.model = build_model(config.model, vocab_size=self.data.vocab_size, seed=config.seed)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        objective = Objective(self.model, chunk_tokens=config.engine.loss_chunk_tokens)
        self.engine = build_engine(objective, config, self.batch, world)
        self.checkpoints = Checkpointer(
            *_owned_root(config, world), config, world, tokenizer_sha256=self.data.tokenizer_sha256
        )
        self.progress = self._restore() or Progress()
        self.guard = Guard(config.guard, scales_loss=config.engine.precision == "fp16", device=world.device)
        self.metrics = MetricsLog(
            storage_for(self.checkpoints.root_uri),
            self.checkpoints.root_uri,
            self.checkpoints.owner,
            resumed_from=self.progress.step,
        )
        self._logged_at = (self.progress, time.perf_counter())
        logger.info(
            "model=%s parameters strategy=%s precision=%s",
            f"{self.num_parameters:,}",
            config.engine.strategy,
            config.engine.precision,
        )

    def fit(self) -> Outcome:
        """Train to the last step and export, or until a rank is told to stop; then state is saved. Collective; blocks.

        Raises DivergedError when the guard says stop, FencedError when another attempt has taken the root over,
        CheckpointError or StorageError when state cannot be written, DatasetError for a sample that cannot be used or a
        tokenizer that cannot be exported, PeerError for an error of another rank, and RuntimeError of torch for a lost
        one.
        """
        loader = Loader(
            lambda first: self.data.samples.step(
                first + self.world.env.rank * self.batch.per_rank, self.batch
            ),
            stride=self.config.global_batch,
            ahead=self.config.data.prefetch_steps,
            device=self.world.device,
        )
        with loader:
            outcome = self._train(loader)
        if outcome == "done":
            self._export()
        return outcome

    def _train(self, loader: Loader) -> Outcome:
        while self.progress.step < self.config.steps:
            due, rate = self._step(loader)
            if not due.judgement:
                continue
            judged = self.guard.judge()
            if judged.roll_back:
                self._roll_back(judged.roll_back)
                continue
            if due.log:
                self._log(judged, rate)
            if due.save:
                self._save()
            if due.stop and self.progress.step < self.config.steps:
                return "preempted"
        return "done"

    def _step(self, loader: Loader) -> tuple[Due, float]:
        """One optimizer step; what follows it, and its learning rate."""
        config = self.config
        answer = self.preemption.ask(self.world.control)
        self._draw_anew()
        rate = learning_rate(config.optim, self.progress.step, config.steps, global_batch=config.global_batch)
        local = loader.step(self.progress.samples_seen)
        targets = self._targets(local)
        result = self.engine.train_step(local.batches, num_targets=targets, learning_rate=rate)
        self.progress = self.progress.after(samples=config.global_batch, targets=targets)
        self.guard.saw(self.progress.step, result)
        return self._due(is_told_to_stop=answer.wait()), rate

    def _draw_anew(self) -> None:
        """Random numbers (dropout) follow from step and rank, so a run that continues here draws the same."""
        told = f"{self.config.seed}/{self.progress.step}/{self.world.env.rank}"
        seed = int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "little")
        # torch.manual_seed, which asks after every kind of device, costs 75 microseconds a step.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.default_generators[self.world.device.index].manual_seed(seed)

    def _targets(self, local: LocalStep) -> int:
        """Of the step, over all ranks."""
        each = self.data.samples.targets_per_sample
        if each is not None:
            return self.config.global_batch * each
        targets = self.world.total(local.num_targets)
        if not targets:
            raise BatchError(
                f"no sample of step {self.progress.step + 1} has a target: each of its labels is ignored. "
                "Give a bigger global_batch, or samples with labels."
            )
        return targets

    def _due(self, *, is_told_to_stop: bool) -> Due:
        config, step = self.config, self.progress.step
        is_last = step == config.steps
        return Due(
            stop=is_told_to_stop,
            log=is_last or step == 1 or step % config.log_interval == 0,
            save=is_last or is_told_to_stop or step % config.checkpoint.interval == 0,
        )

    def _roll_back(self, reason: str) -> None:
        """Continue from the newest checkpoint with the data that follows what was seen. Collective."""
        seen = self.progress
        restored = self._restore()
        if restored is None:
            raise DivergedError(
                f"{reason}, and there is no checkpoint to go back to. Lower checkpoint.interval, or let "
                "guard.on_non_finite and guard.on_spike be other than roll-back."
            )
        self.progress = replace(restored, samples_seen=seen.samples_seen)
        self._logged_at = (self.progress, time.perf_counter())
        self.metrics.roll_back(restored.step)
        logger.warning(
            "%s; rolled back from step %d to step %d, and leaving out the %d samples between",
            *(reason, seen.step, restored.step, seen.samples_seen - restored.samples_seen),
        )

    def _log(self, judged: Judgement, rate: float) -> None:
        before, since = self._logged_at
        now = time.perf_counter()
        self._logged_at = (self.progress, now)
        if not self.world.env.is_primary:
            return
        self.metrics.record(
            StepEvent(
                step=self.progress.step,
                steps=self.config.steps,
                loss=_finite(judged.last.loss),
                learning_rate=rate,
                grad_norm=_finite(judged.last.grad_norm),
                tokens_per_second=(self.progress.tokens_seen - before.tokens_seen) / (now - since),
            )
        )

    def _save(self) -> None:
        self.world.from_primary(self.metrics.upload)
        self.checkpoints.save(Snapshot(self.progress, self.engine.state()))

    def _restore(self) -> Progress | None:
        progress = self.checkpoints.restore(self.engine.state())
        if progress is None:
            logger.info("no checkpoint: beginning at step 0")
        else:
            self.engine.state_loaded()
        return progress

    def _export(self) -> None:
        uri = self.world.env.model_dir
        if not uri:
            logger.info("nothing is exported: AIP_MODEL_DIR is not set")
            return
        weights = self.engine.weights()
        self.world.from_primary(
            lambda: write_export(
                uri,
                weights=weights,
                model=self.model,
                seq_len=self.config.data.seq_len,
                dataset_uri=self.config.data.uri,
                dataset=self.data.manifest,
                metrics=self.metrics.joined(),
                manifest_of=self._export_manifest,
                check_owner=self.checkpoints.check_owner,
            )
        )
        logger.info("exported the model to %s", uri)

    def _export_manifest(self, objects: tuple[CheckpointObject, ...]) -> ExportManifest:
        return ExportManifest(
            format_version=FORMAT_VERSION,
            step=self.progress.step,
            tokens_seen=self.progress.tokens_seen,
            num_parameters=self.num_parameters,
            config=json.loads(self.config.to_json()),
            config_hash=self.config.hash,
            dataset_uri=self.config.data.uri,
            world_size=self.world.env.world_size,
            attempt=self.checkpoints.owner.attempt,
            checkpoint_uri=step_dir_uri(self.checkpoints.root_uri, self.progress.step),
            objects=objects,
        )


def _owned_root(config: JobConfig, world: World) -> tuple[str, Owner]:
    """The checkpoint root and its owner: the attempt our launcher minted, or one that rank 0 takes for all."""
    root_uri = config.checkpoint.root_uri(world.env.checkpoint_dir)
    owner = world.env.owner or world.from_primary(lambda: take_ownership(root_uri, storage_for(root_uri)))
    return root_uri, owner


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
