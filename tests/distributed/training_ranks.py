"""What each rank of test_training.py does: trainings one after another in one process group.

python -m distributed.training_ranks '[{"name": ..., "config": <JobConfig>, "drop_out_at": null | step}, ...]'
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace

from penstock_trainer.contract.config import parse_args
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World


class DropOut(Exception):
    """The end of a trainer that had no time to save."""


class Dropping(Preemption):
    """Its trainer is gone before the step after `drop_out_at`."""

    trainer: Trainer
    drop_out_at: int | None = None

    @property
    def is_told(self) -> bool:
        if self.trainer.progress.step == self.drop_out_at:
            raise DropOut
        return super().is_told


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    env = RankEnv.from_environ(os.environ)
    with World.join(env, timeout_seconds=60) as world:
        for scenario in json.loads(sys.argv[1]):
            sys.stdout.write(json.dumps({"scenario": scenario["name"]}) + "\n")
            told = replace(world, env=replace(env, model_dir=scenario.get("model_dir", "")))
            preemption = Dropping()
            trainer = Trainer(parse_args([f"--config={scenario['config']}"]), told, preemption)
            preemption.trainer, preemption.drop_out_at = trainer, scenario.get("drop_out_at")
            try:
                trainer.fit()
            except DropOut:
                continue


if __name__ == "__main__":
    main()
