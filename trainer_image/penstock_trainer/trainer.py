"""A training run on one rank, from the newest checkpoint to the last step and the export."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import torch

from penstock_trainer import agreement
from penstock_trainer.checkpoints.checkpointer import Checkpointer
from penstock_trainer.checkpoints.local_root import LocalRoot
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.restore import Restorer
from penstock_trainer.contract.checkpoint import CheckpointObject, Owner, step_dir_uri
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import EvaluationEvent
from penstock_trainer.contract.export import FORMAT_VERSION, ExportManifest
from penstock_trainer.data import open_data
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.samples import LocalStep
from penstock_trainer.engines import build_engine
from penstock_trainer.errors import BatchError, DivergedError
from penstock_trainer.evaluation import improves, open_evaluation
from penstock_trainer.export import write_export
from penstock_trainer.garbage import collect_at, collected_by_step
from penstock_trainer.guard import Guard, Judgement
from penstock_trainer.heartbeat import Heart, Phase
from penstock_trainer.loader import Loader
from penstock_trainer.metrics import MetricsLog
from penstock_trainer.model.buffers import average_buffers
from penstock_trainer.model.build import build_model
from penstock_trainer.model.objective import Objective
from penstock_trainer.observe.clock import clock_for
from penstock_trainer.observe.flops import flops_per_token
from penstock_trainer.observe.goodput import GoodputLog
from penstock_trainer.observe.observer import Observer
from penstock_trainer.optim import learning_rate
from penstock_trainer.outcome import Outcome
from penstock_trainer.preemption import Preemption
from penstock_trainer.storage import storage_for
from penstock_trainer.tuning import TuningReport
from penstock_trainer.world import World, is_lost_peer, is_transient

logger = logging.getLogger(__name__)

_LEAVING_SECONDS = 4.0
"""Of a preempted run's budget: to leave the process groups, and to be seen to have ended."""
_WRITE_SECONDS = 60.0
"""For a save under way, and for old checkpoints to be deleted, when the run ends."""
_COMMIT_SECONDS = 5.0
"""For a save that all ranks had written when one of them was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What follows a step. Alike on all ranks."""

    stop: bool
    """A rank was told to stop."""
    fail: bool
    """A rank can save no more."""
    log: bool
    evaluate: bool
    save: bool
    upload: bool
    """To the root, and not to the nodes' disks alone."""
    busy: bool
    """When the step began, the save before was still being written on a rank."""
    uploading: bool
    """The same of a save that goes to the root."""

    @property
    def judgement(self) -> bool:
        """Whether the step has to be judged first: no run can continue from a state that has diverged."""
        return self.log or self.evaluate or self.save


class Trainer:
    """A run on this rank, from the newest checkpoint on. Construction is collective and reads data and checkpoint."""

    def __init__(
        self, config: JobConfig, world: World, preemption: Preemption, heart: Heart | None = None
    ) -> None:
        root_uri, owner = _owned_root(config, world)
        # Before anything that takes time, so that an attempt that does not get far is known too.
        self.goodput = GoodputLog(
            root_uri,
            owner,
            world_size=world.env.world_size,
            num_nodes=world.env.world_size // world.env.local_world_size,
            save_interval=config.checkpoint.interval,
            writes=world.env.is_primary,
        )
        try:
            self._open(config, world, preemption, heart or Heart(None), root_uri, owner)
        except Exception as exc:
            self.goodput.close("retryable" if is_transient(exc) else "failed")
            raise

    def _open(
        self,
        config: JobConfig,
        world: World,
        preemption: Preemption,
        heart: Heart,
        root_uri: str,
        owner: Owner,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.world = world
        self.preemption = preemption
        self.heart = heart
        self.batch = BatchPlan.of(config, world.env.world_size)
        self.data = open_data(config, world)
        self.model = build_model(config.model, vocab_size=self.data.vocab_size, seed=config.seed)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        flops = flops_per_token(self.model, config.data.seq_len)  # of the model while it is whole
        objective = Objective(self.model, chunk_tokens=config.engine.loss_chunk_tokens)
        self.clock = clock_for(world.device, finds_waits=world.env.world_size > 1)
        self.engine = build_engine(objective, config, self.batch, world, self.clock)
        sha256 = self.data.tokenizer_sha256
        local_dir = config.checkpoint.local_dir
        self.local_root = LocalRoot(local_dir, root_uri, owner) if local_dir else None
        self.restorer = Restorer(root_uri, config, world, tokenizer_sha256=sha256, local_root=self.local_root)
        self.progress = self._restore() or Progress()
        self.goodput.restored(self.progress.step)
        self.checkpoints = Checkpointer(
            root_uri,
            owner,
            config,
            world,
            self.engine.state(),
            tokenizer_sha256=sha256,
            local_root=self.local_root,
        )
        self.evaluation_seconds = 0.0
        """Of the last one."""
        self.has_stepped = False
        """Whether this process has done a step."""
        self.guard = Guard(config.guard, scales_loss=config.engine.precision == "fp16", device=world.device)
        self.metrics = MetricsLog(
            storage_for(self.checkpoints.root_uri),
            self.checkpoints.root_uri,
            self.checkpoints.owner,
            resumed_from=self.progress.step,
        )
        self.evaluation = (
            open_evaluation(config, self.data.manifest, self.engine, world)
            if config.evaluation.interval
            else None
        )
        self.tuning = TuningReport(world.env, evaluates=self.evaluation is not None)
        self.observer = Observer(
            config,
            world,
            self.clock,
            flops_per_token=flops,
            root_uri=self.checkpoints.root_uri,
            owner=self.checkpoints.owner,
            progress=self.progress,
        )
        logger.info(
            "model=%s parameters strategy=%s precision=%s",
            f"{self.num_parameters:,}",
            config.engine.strategy,
            config.engine.precision,
        )

    def fit(self) -> Outcome:
        """Train to the last step and export, or until a rank is told to stop; then state is saved. Collective; blocks.

        Raises DivergedError when the guard says stop, FencedError when another attempt has taken the root over,
        CheckpointError or StorageError when state cannot be written or the best step's is gone, DatasetError for a sample
        that cannot be used or a tokenizer that cannot be exported, OSError when a tuning trial cannot report, PeerError
        for an error of another rank, and RuntimeError of torch for a lost one.
        """
        try:
            with closing(self.observer):
                outcome = self._fit()
        except Exception as exc:
            lost = is_lost_peer(exc)
            self.checkpoints.close(_COMMIT_SECONDS if lost else _WRITE_SECONDS, peers_lost=lost)
            raise
        self.checkpoints.close(_WRITE_SECONDS if outcome == "done" else _LEAVING_SECONDS / 8)
        return outcome

    def _fit(self) -> Outcome:
        loader = Loader(
            lambda first: self.data.samples.step(
                first + self.world.env.rank * self.batch.per_rank, self.batch
            ),
            stride=self.config.global_batch,
            ahead=self.config.data.prefetch_steps,
            device=self.world.device,
        )
        with loader, collected_by_step(), self.goodput.span("compute"):
            outcome = self._train(loader)
        if outcome == "done":
            if self.restorer.restored_locally == self.progress.step:
                self._copy(to_root=True)  # all was done when it was restored, and its upload was lost
            self._finish_saving()
            self.heart.beat("exporting", self.progress.step)
            with self.goodput.span("export"):
                self._export()
            if self.local_root and self.world.env.local_rank == 0:
                self.local_root.remove()
        return outcome

    def _train(self, loader: Loader) -> Outcome:
        while not self._is_over:
            due, rate = self._step(loader)
            if due.fail:
                self.heart.beat("saving", self.progress.step)
                self.checkpoints.raise_together()
            if not due.judgement:
                continue
            judged = self.guard.judge()
            self.observer.judged(judged)
            if judged.roll_back:
                if due.stop:
                    return "preempted"  # the checkpoint to go back to stands
                self._roll_back(judged.roll_back)
                continue
            if due.log:
                self._log(judged, rate)
            is_best = due.evaluate and self._has_time_to_evaluate(due) and self._evaluate()
            if not self._go_on(due, is_best=is_best):
                self._save_in_time()
                return "preempted"
        return "done"

    def _go_on(self, due: Due, *, is_best: bool) -> bool:
        """Save what is due; False when the run has to stop here."""
        if due.stop and not self._is_over:
            return False
        if is_best or self._is_over:
            return self._save(due, to_root=True)
        if due.save and self._has_room(due):
            # A disk that is free takes the save also while the upload of another goes on.
            to_root = due.upload and not (due.uploading and self.local_root)
            return self._save(due, to_root=to_root)
        return True

    def _step(self, loader: Loader) -> tuple[Due, float]:
        """One optimizer step; what follows it, and its learning rate."""
        config = self.config
        self.observer.profile.begin_step(self.progress.step + 1)
        answer = agreement.ask(
            self.world.control,
            self.preemption.is_told,
            self.checkpoints.has_failed,
            self.checkpoints.is_busy,
            self.checkpoints.is_uploading,
        )
        # Compiling may take the first step minutes.
        phase: Phase = "training" if self.has_stepped else "starting"
        self.heart.beat(phase, self.progress.step + 1)
        self._draw_anew()
        rate = learning_rate(config.optim, self.progress.step, config.steps, global_batch=config.global_batch)
        with self.clock.span("data"):
            local = loader.step(self.progress.samples_seen)
        self.heart.beat(
            phase, self.progress.step + 1
        )  # tells a loader that hangs from ranks that wait for it
        targets = self._targets(local)
        result = self.engine.train_step(local.batches, num_targets=targets, learning_rate=rate)
        self.progress = self.progress.after(samples=config.global_batch, targets=targets)
        self.guard.saw(self.progress.step, result)
        self.has_stepped = True
        self.goodput.step_done(self.progress.step)
        self._tell_committed()
        collect_at(self.progress.step)
        return self._due(*answer.wait()), rate

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

    def _due(self, is_told_to_stop: bool, has_failed: bool, is_busy: bool, is_uploading: bool) -> Due:
        config, step = self.config, self.progress.step
        is_last = step == config.steps
        return Due(
            stop=is_told_to_stop,
            fail=has_failed,
            log=is_last or step == 1 or step % config.log_interval == 0,
            evaluate=self.evaluation is not None and (is_last or step % config.evaluation.interval == 0),
            save=is_last or is_told_to_stop or step % config.checkpoint.interval == 0,
            upload=step % (config.checkpoint.interval * config.checkpoint.upload_every) == 0,
            busy=is_busy,
            uploading=is_uploading,
        )

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left to train: at the last step, or when evaluations no longer improve."""
        patience = self.config.evaluation.patience
        has_stalled = 0 < patience <= self.progress.stale_evaluations
        return has_stalled or self.progress.step >= self.config.steps

    def _evaluate(self) -> bool:
        """Score the step, and keep in the progress what follows from it; whether it is the best so far. Collective."""
        assert self.evaluation is not None, "an evaluation is due only where there is one"
        with self.clock.span("evaluation"), self.goodput.span("evaluation"):
            average_buffers(self.model)
            scores = self.evaluation.run(lambda: self.heart.beat("evaluating", self.progress.step))
        config = self.config.evaluation
        self.evaluation_seconds = scores.seconds
        value = scores.loss if config.metric == "loss" else scores.accuracy
        is_best = improves(value, self.progress.best, config)
        self.progress = self.progress.evaluated(value, is_best=is_best)
        event = EvaluationEvent(step=self.progress.step, best=is_best, **asdict(scores))

        def tell() -> None:
            self.metrics.record(event)
            self.observer.trackers.evaluation(event)
            self.tuning.report(config.metric, value, step=event.step)

        self.world.from_primary(tell)
        if self._is_over and self.progress.step < self.config.steps:
            logger.info("ending at step %d: %d evaluations without improvement", event.step, config.patience)
        return is_best

    def _roll_back(self, reason: str) -> None:
        """Continue from the newest checkpoint with the data that follows what was seen. Collective."""
        seen = self.progress
        self._finish_saving(must_be_saved=False)
        restored = self._restore()
        if restored is None:
            raise DivergedError(
                f"{reason}, and there is no checkpoint to go back to. Lower checkpoint.interval, or let "
                "guard.on_non_finite and guard.on_spike be other than roll-back."
            )
        self.progress = replace(restored, samples_seen=seen.samples_seen)
        self.goodput.rolled_back(restored.step)
        self.observer.begin_anew(self.progress)
        self.metrics.roll_back(restored.step)
        logger.warning(
            "%s; rolled back from step %d to step %d, and leaving out the %d samples between",
            *(reason, seen.step, restored.step, seen.samples_seen - restored.samples_seen),
        )

    def _log(self, judged: Judgement, rate: float) -> None:
        event = self.observer.line(self.progress, judged, learning_rate=rate)
        if self.world.env.is_primary:
            self.metrics.record(event)
            self.observer.trackers.step(event)

    def _has_time_to_evaluate(self, due: Due) -> bool:
        """Whether a run that was told to stop has the time for it and a save. Collective where it was."""
        if not due.stop:
            return True
        evaluating, saving = self.world.from_primary(
            lambda: (self.evaluation_seconds, self.checkpoints.last_seconds)
        )
        if evaluating + saving <= self._seconds_left():
            return True
        logger.warning("step %d is not evaluated: there is no time left for it", self.progress.step)
        return False

    def _has_room(self, due: Due) -> bool:
        """Whether a save that may be left out is done."""
        if due.busy and self.config.checkpoint.when_busy == "skip":
            logger.warning("step %d is not saved: the save before it is still under way", self.progress.step)
            return False
        return True

    def _save(self, due: Due, *, to_root: bool) -> bool:
        """Whether it was begun: False when a rank was told to stop while all waited for the save before.

        Collective where one is under way: ranks wait together, as none may be taken to hang.
        """
        self.heart.beat("saving", self.progress.step)
        with self.clock.span("checkpoint"):
            average_buffers(self.model)
            if due.busy or (to_root and due.uploading):
                logger.info("the save of step %d waits for the one before it", self.progress.step)
                with self.goodput.span("blocked_by_saving"):
                    if not self.checkpoints.wait(is_told_to_stop=lambda: self.preemption.is_told):
                        return False
            self._copy(to_root=to_root)
        return True

    def _copy(self, *, to_root: bool) -> None:
        recorded = self.metrics.recorded
        self.world.wait_for_device()  # else what it still computes would count as the copy's time
        with self.goodput.saving(self.progress.step):
            self.checkpoints.save(
                self.progress,
                self.engine.state(),
                before_commit=lambda: self._upload(recorded),
                to_root=to_root,
            )

    def _save_in_time(self) -> None:
        """The last save of a run that was told to stop, if it fits into what is left of the time. Collective."""
        if not self._finish_saving(self._seconds_left(), must_be_saved=False):
            logger.warning(
                "the save under way did not end in time; the run will continue from the one before"
            )
            return
        left, needed = self._seconds_left(), self.world.from_primary(lambda: self.checkpoints.last_seconds)
        if needed > left:
            logger.warning(
                "step %d is not saved: that took %.1f s the last time, and %.1f s are left",
                *(self.progress.step, needed, left),
            )
            return
        average_buffers(self.model)
        self._copy(to_root=True)
        if not self._finish_saving(self._seconds_left()):
            logger.warning("the save of step %d did not end in time", self.progress.step)

    def _finish_saving(self, timeout_seconds: float | None = None, *, must_be_saved: bool = True) -> bool:
        """See Checkpointer.finish."""
        self.heart.beat("saving", self.progress.step)
        with self.goodput.span("blocked_by_saving"):
            is_in_time = self.checkpoints.finish(timeout_seconds, must_be_saved=must_be_saved)
        self._tell_committed()
        return is_in_time

    def _tell_committed(self) -> None:
        for step, seconds in self.checkpoints.committed():
            self.goodput.committed(step, seconds)

    def _seconds_left(self) -> float:
        """Of the shortest budget of any rank. Collective."""
        return max(0.0, min(self.world.gather(self.preemption.seconds_left)) - _LEAVING_SECONDS)

    def _upload(self, recorded: int) -> None:
        self.metrics.upload(recorded)
        self.observer.trackers.upload()

    def _restore(self) -> Progress | None:
        self.heart.beat("restoring", 0)
        with self.goodput.span("restore"):
            progress = self.restorer.restore(self.engine.state())
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
        exported, checkpoint_uri = self._to_export()
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
                manifest_of=lambda objects: self._export_manifest(objects, exported, checkpoint_uri),
                check_owner=self.checkpoints.check_owner,
            )
        )
        logger.info("exported the model to %s", uri)

    def _to_export(self) -> tuple[Progress, str]:
        """What is exported, and its checkpoint; the best step's weights are loaded into the engine. Collective."""
        best = self.progress.best
        if not self.config.evaluation.export_best or best is None or best.step == self.progress.step:
            return self.progress, step_dir_uri(self.checkpoints.root_uri, self.progress.step)
        found = self.restorer.load(self.engine.state(), best.step)
        self.engine.state_loaded()
        logger.info("exporting the best step, %d, and not the last, %d", best.step, self.progress.step)
        return found

    def _export_manifest(
        self, objects: tuple[CheckpointObject, ...], exported: Progress, checkpoint_uri: str
    ) -> ExportManifest:
        return ExportManifest(
            format_version=FORMAT_VERSION,
            step=exported.step,
            tokens_seen=exported.tokens_seen,
            num_parameters=self.num_parameters,
            config=json.loads(self.config.to_json()),
            config_hash=self.config.hash,
            dataset_uri=self.config.data.uri,
            world_size=self.world.env.world_size,
            attempt=self.checkpoints.owner.attempt,
            checkpoint_uri=checkpoint_uri,
            objects=objects,
        )


def _owned_root(config: JobConfig, world: World) -> tuple[str, Owner]:
    """The checkpoint root and its owner: the attempt our launcher minted, or one that rank 0 takes for all."""
    root_uri = config.checkpoint.root_uri(world.env.checkpoint_dir)
    owner = world.env.owner or world.from_primary(lambda: take_ownership(root_uri, storage_for(root_uri)))
    return root_uri, owner
