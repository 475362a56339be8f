"""A training run on one rank, from the newest checkpoint to the last step and the export."""

from __future__ import annotations

import json
import logging
import math
import time

import torch
import torch.distributed as dist

from penstock_trainer.checkpoint import Checkpointer, Progress, Snapshot
from penstock_trainer.contract.checkpoint import CheckpointObject, Owner, step_dir_uri
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.contract.export import FORMAT_VERSION, ExportManifest
from penstock_trainer.data import BatchPlan, open_train_split, read_manifest
from penstock_trainer.engines import build_engine
from penstock_trainer.engines.engine import StepResult
from penstock_trainer.errors import DivergedError
from penstock_trainer.export import write_export
from penstock_trainer.loader import Loader
from penstock_trainer.metrics import MetricsLog
from penstock_trainer.model.build import build_model
from penstock_trainer.model.objective import Batch, Objective
from penstock_trainer.optim import learning_rate
from penstock_trainer.outcome import Outcome
from penstock_trainer.ownership import take_ownership
from penstock_trainer.preemption import Preemption
from penstock_trainer.storage import storage_for
from penstock_trainer.world import World

logger = logging.getLogger(__name__)


class Trainer:
    """A run on this rank, from the newest checkpoint on. Construction is collective and reads data and checkpoint."""

    def __init__(self, config: JobConfig, world: World, preemption: Preemption) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.world = world
        self.preemption = preemption
        self.batch = BatchPlan.of(config, world.env.world_size)
        self.dataset = world.from_primary(lambda: read_manifest(config.data.uri))
        self.windows = open_train_split(config.data.uri, self.dataset, config, world)
        self.model = build_model(config.model, vocab_size=self.dataset.tokenizer.vocab_size, seed=config.seed)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        objective = Objective(self.model, chunk_tokens=config.engine.loss_chunk_tokens)
        self.engine = build_engine(objective, config, self.batch, world)
        self.checkpoints = Checkpointer(
            *_owned_root(config, world), config, world, tokenizer_sha256=self.dataset.tokenizer.sha256
        )
        self.progress = self._restore()
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

        Raises DivergedError when a step that is logged or saved is not finite, FencedError when another attempt has
        taken the root over, CheckpointError or StorageError when state cannot be written, DatasetError when the
        tokenizer cannot be exported, PeerError for an error of another rank, and RuntimeError of torch for a lost one.
        """
        config = self.config
        loader = Loader(
            self._load, stride=config.global_batch, ahead=config.data.prefetch_steps, device=self.world.device
        )
        with loader:
            return self._train(loader)

    def _train(self, loader: Loader) -> Outcome:
        config, steps = self.config, self.config.steps
        num_targets = config.global_batch * config.data.seq_len
        while self.progress.step < steps:
            answer = self.preemption.ask(self.world.control)
            rate = learning_rate(config.optim, self.progress.step, steps, global_batch=config.global_batch)
            result = self.engine.train_step(
                loader.step(self.progress.samples_seen), num_targets=num_targets, learning_rate=rate
            )
            self.progress = self.progress.after(samples=config.global_batch, seq_len=config.data.seq_len)
            is_told_to_stop = answer.wait()
            is_logged = self._is_logged(self.progress.step)
            is_saved = is_told_to_stop or self._is_saved(self.progress.step)
            if is_logged or is_saved:
                loss = self._finite_loss(result)
                if is_logged and self.world.env.is_primary:
                    self._log(loss, result, rate)
            if is_saved:
                self._save()
            if is_told_to_stop and self.progress.step < steps:
                return "preempted"
        self._export()
        return "done"

    def _load(self, first: int) -> list[Batch]:
        """This rank's micro-batches of the step whose first sample over all ranks is `first`."""
        return self.windows.batches(first + self.world.env.rank * self.batch.per_rank, self.batch)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_interval == 0 or step in (1, self.config.steps)

    def _is_saved(self, step: int) -> bool:
        return step % self.config.checkpoint.interval == 0 or step == self.config.steps

    def _finite_loss(self, result: StepResult) -> float:
        """The step's loss over all ranks: the one place where the loop waits for the device.

        Also asked before a save, as no run can continue from a state that has diverged. Raises DivergedError.
        """
        summed = result.loss.clone()
        dist.all_reduce(summed)
        loss, grad_norm = summed.item(), float(result.grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"the loss of step {self.progress.step} is {loss} and its gradient's norm {grad_norm}. Lower "
                "optim.learning_rate or lengthen optim.warmup_steps, and continue from a checkpoint before it."
            )
        return loss

    def _log(self, loss: float, result: StepResult, rate: float) -> None:
        before, since = self._logged_at
        now = time.perf_counter()
        self._logged_at = (self.progress, now)
        self.metrics.record(
            StepEvent(
                step=self.progress.step,
                steps=self.config.steps,
                loss=loss,
                learning_rate=rate,
                grad_norm=float(result.grad_norm),
                tokens_per_second=(self.progress.tokens_seen - before.tokens_seen) / (now - since),
            )
        )

    def _save(self) -> None:
        self.world.from_primary(self.metrics.upload)
        self.checkpoints.save(Snapshot(self.progress, self.engine.state()))

    def _restore(self) -> Progress:
        progress = self.checkpoints.restore(self.engine.state())
        if progress is None:
            logger.info("no checkpoint: beginning at step 0")
            return Progress()
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
                dataset=self.dataset,
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
