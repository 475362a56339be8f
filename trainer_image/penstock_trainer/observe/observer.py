"""What one rank observes of its run, from the first step to the last."""

from __future__ import annotations

import math
import time

import torch.distributed as dist

from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.guard import Judgement
from penstock_trainer.observe.accelerator import Utilization, peak_memory_bytes
from penstock_trainer.observe.clock import Clock
from penstock_trainer.observe.communication import NcclTime
from penstock_trainer.observe.flight import collectives, dumps
from penstock_trainer.observe.profile_window import ProfileWindow
from penstock_trainer.observe.rank_report import RankReport, shown
from penstock_trainer.observe.tracker import open_trackers
from penstock_trainer.world import World


class Observer:
    """Makes a logged line of what all ranks measured since the line before."""

    def __init__(
        self,
        config: JobConfig,
        world: World,
        clock: Clock,
        *,
        flops_per_token: float | None,
        root_uri: str,
        owner: Owner,
        progress: Progress,
    ) -> None:
        self._config = config
        self._world = world
        self._clock = clock
        self._flops_per_token = flops_per_token
        self._utilization = Utilization(world.device)
        self._nccl = NcclTime() if dist.get_backend() == "nccl" and config.observe.flight_records else None
        self.trackers = open_trackers(config, world.env, root_uri=root_uri)
        self.profile = ProfileWindow(
            config.observe,
            root_uri=root_uri,
            attempt=owner.attempt,
            rank=world.env.rank,
            device=world.device,
        )
        self.begin_anew(progress)

    def begin_anew(self, progress: Progress) -> None:
        """The next line counts from here: at the start, and after a roll-back."""
        self._clock.read()
        self._count_from(progress, time.perf_counter())

    def judged(self, judgement: Judgement) -> None:
        """To be told each judgement, of which there may be several between two lines."""
        self._skipped += judgement.skipped

    def line(self, progress: Progress, judgement: Judgement, *, learning_rate: float) -> StepEvent:
        """The step that was just judged, and what was measured since the line before, which begins anew. Collective."""
        before, since, skipped = self._before, self._since, self._skipped
        now = time.perf_counter()
        self._count_from(progress, now)
        seconds, steps = now - since, progress.step - before.step
        report = self._report(seconds / steps, steps)
        reports = self._world.gather(report) if self._world.env.world_size > 1 else [report]
        tokens_per_second = (progress.tokens_seen - before.tokens_seen) / seconds
        return StepEvent(
            step=progress.step,
            steps=self._config.steps,
            loss=_finite(judgement.last.loss),
            learning_rate=learning_rate,
            grad_norm=_finite(judgement.last.grad_norm),
            tokens_per_second=tokens_per_second,
            samples_per_second=(progress.samples_seen - before.samples_seen) / seconds,
            mfu=self._mfu(tokens_per_second),
            skipped_steps=skipped,
            **shown(reports),
        )

    def close(self) -> None:
        """The run ends here, well or not. Blocks on storage and on trackers."""
        self.profile.close()
        self.trackers.close()

    def _count_from(self, progress: Progress, now: float) -> None:
        self._before = progress
        self._since = now
        self._skipped = 0

    def _report(self, step_seconds: float, steps: int) -> RankReport:
        split = self._clock.read()
        communication = None if split.blocked is None else split.blocked / steps
        if self._world.env.world_size == 1:
            communication = 0.0
        elif self._nccl is not None:
            share = self._nccl.share(lambda: collectives(dumps()))
            communication = None if share is None else share * step_seconds
        return RankReport(
            step_seconds=step_seconds,
            seconds={part: seconds / steps for part, seconds in split.seconds.items()},
            communication_seconds=communication,
            peak_memory_bytes=peak_memory_bytes(self._world.device),
            utilization=self._utilization.read(),
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        peak = self._config.observe.peak_tflops * 1e12 * self._world.env.world_size
        if not peak or self._flops_per_token is None:
            return None
        return tokens_per_second * self._flops_per_token / peak


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
