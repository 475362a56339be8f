"""What a trial of a Vertex hyperparameter tuning job tells the service: the metric, through cloudml-hypertune.

The library writes a file (CLOUD_ML_HP_METRIC_FILE) that the service reads. Only the primary reports: the ranks of a
trial would overwrite each other's file.
"""

from __future__ import annotations

import importlib
from typing import Any

from penstock_trainer.errors import TuningError
from penstock_trainer.rank_env import RankEnv


class TuningReport:
    """The reports of one process. Does nothing outside of a trial and on any rank but the primary."""

    def __init__(self, env: RankEnv, *, evaluates: bool) -> None:
        """`evaluates`: whether the run has anything to report.

        In a trial, raises TuningError where it has not or cloudml-hypertune is not installed, on every rank alike.
        """
        self._hypertune: Any = None
        if env.trial_id:
            if not evaluates:
                raise TuningError(
                    f"this is trial {env.trial_id} of a tuning job, and it would report nothing: evaluation.interval is "
                    "0. Set it to the number of steps after which evaluation.metric is to be reported."
                )
            library = _library(env.trial_id)
            if env.is_primary:
                self._hypertune = library.HyperTune()
                self._hypertune.trial_id = env.trial_id

    def report(self, metric: str, value: float, *, step: int) -> None:
        """Tell the metric's value at an optimizer step. Raises OSError when the file cannot be written."""
        if self._hypertune is not None:
            self._hypertune.report_hyperparameter_tuning_metric(
                hyperparameter_metric_tag=metric, metric_value=value, global_step=step
            )


def _library(trial_id: str) -> Any:
    try:
        return importlib.import_module("hypertune")
    except ImportError as exc:
        raise TuningError(
            f"this is trial {trial_id} of a tuning job, and cloudml-hypertune, through which it reports, is not "
            "installed: pip install 'penstock[trainer]'."
        ) from exc
