"""The seam between a run and what shows its curves; rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import EvaluationEvent, StepEvent
from penstock_trainer.observe.tensorboard import TensorBoard
from penstock_trainer.observe.wandb_run import WandbRun
from penstock_trainer.rank_env import RankEnv

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place where a run's curves can be seen. Steps come in order; after a roll-back they come again."""

    def step(self, event: StepEvent) -> None:
        """Show a logged step. Does not block on the network."""

    def evaluation(self, event: EvaluationEvent) -> None:
        """Show an evaluation. Does not block on the network."""

    def upload(self) -> None:
        """Have in storage what was shown since the last call, where the tracker keeps it there. May block.

        Called in a thread of its own, while steps are shown.
        """

    def close(self) -> None:
        """The run ends here, well or not. May block; nothing is called after it."""


class Trackers:
    """Several as one. One that fails is warned about and takes nothing from the run or from the others."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def step(self, event: StepEvent) -> None:
        """See Tracker.step."""
        self._each(lambda tracker: tracker.step(event))

    def evaluation(self, event: EvaluationEvent) -> None:
        """See Tracker.evaluation."""
        self._each(lambda tracker: tracker.evaluation(event))

    def upload(self) -> None:
        """See Tracker.upload."""
        self._each(lambda tracker: tracker.upload())

    def close(self) -> None:
        """See Tracker.close."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                call(tracker)
            except Exception:
                logger.warning("%s failed; the run goes on", type(tracker).__name__, exc_info=True)


def open_trackers(config: JobConfig, env: RankEnv, *, root_uri: str) -> Trackers:
    """Those that the config asks for and the environment allows; none on ranks other than 0."""
    opened: list[Tracker] = []
    if env.is_primary and config.observe.tensorboard and env.tensorboard_dir:
        opened.append(TensorBoard(env.tensorboard_dir))
        logger.info("TensorBoard events go to %s", env.tensorboard_dir)
    if env.is_primary and config.observe.wandb_project:
        if env.wandb_mode:
            run = WandbRun.open(config, root_uri=root_uri, mode=env.wandb_mode)
            opened += [run] if run else []
        else:
            logger.info(
                "nothing goes to Weights & Biases: neither WANDB_API_KEY nor WANDB_MODE=offline is set"
            )
    return Trackers(opened)
