"""Weights & Biases: a run that continues over restarts."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from dataclasses import asdict
from typing import Any, Literal, Self

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.events import EvaluationEvent, StepEvent

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline"]


def run_id(root_uri: str, config: JobConfig) -> str:
    """The same for every attempt of a run, and another for another root or config."""
    return hashlib.sha256(f"{root_uri}\n{config.hash}".encode()).hexdigest()[:16]


class WandbRun:
    """See Tracker."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls, config: JobConfig, *, root_uri: str, mode: Mode) -> Self | None:
        """Begin the run, or continue it; None, with a warning, when wandb is not there or does not let us.

        Blocks on the network when `mode` is online.
        """
        try:
            wandb: Any = importlib.import_module("wandb")
            run = wandb.init(
                project=config.observe.wandb_project,
                id=run_id(root_uri, config),
                resume="allow",
                mode=mode,
                settings=wandb.Settings(console="off"),  # stdout is the job's structured log
                config={**json.loads(config.to_json()), "checkpoint_root": root_uri},
            )
        except ImportError:
            logger.warning(
                "observe.wandb_project = %r, and wandb is not installed: nothing is sent. Install penstock[wandb].",
                config.observe.wandb_project,
            )
            return None
        except Exception:
            logger.warning("Weights & Biases cannot be reached; the run goes on without", exc_info=True)
            return None
        # Steps may come again after a restart or a roll-back, and wandb's own count only grows.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return cls(run)

    def step(self, event: StepEvent) -> None:
        """See Tracker.step."""
        self._log("train", asdict(event))

    def evaluation(self, event: EvaluationEvent) -> None:
        """See Tracker.evaluation."""
        self._log("evaluation", asdict(event))

    def upload(self) -> None:
        """See Tracker.upload. Nothing: wandb sends on its own, or keeps an offline run in ./wandb."""

    def close(self) -> None:
        """See Tracker.close."""
        self._run.finish()

    def _log(self, group: str, fields: dict[str, Any]) -> None:
        shown = {f"{group}/{name}": value for name, value in fields.items() if value is not None}
        self._run.log({"step": fields["step"], **shown})
