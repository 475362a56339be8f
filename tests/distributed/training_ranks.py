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
from penstock_trainer.heartbeat import Heart, Phase
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World


class DropOut(Exception):
    """The end of a trainer that had no time to save."""


class Dropping(Heart):
    """Its trainer is gone before the step after `drop_out_at`."""

    def __init__(self, drop_out_at: int | None) -> None:
        super().__init__(None)
        self._drop_out_at = drop_out_at

    def beat(self, phase: Phase, step: int) -> None:
        """See Heart.beat; a step's first says which one begins."""
        if phase in ("starting", "training") and step - 1 == self._drop_out_at:
            raise DropOut
        super().beat(phase, step)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    env = RankEnv.from_environ(os.environ)
    with World.join(env, timeout_seconds=60) as world:
        for scenario in json.loads(sys.argv[1]):
            sys.stdout.write(json.dumps({"scenario": scenario["name"]}) + "\n")
            told = replace(world, env=replace(env, model_dir=scenario.get("model_dir", "")))
            config = parse_args([f"--config={scenario['config']}"])
            trainer = Trainer(config, told, Preemption(), Dropping(scenario.get("drop_out_at")))
            try:
                trainer.fit()
            except DropOut:
                continue


if __name__ == "__main__":
    main()
