"""What the ranks of test_observe.py do: trainings one after another in one process group, as a rank trains them.

python -m distributed.observed_ranks '[{"name": ..., "config": <JobConfig>, "tensorboard_dir": ...}, ...]'
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace

from penstock_trainer.contract.config import parse_args
from penstock_trainer.observe.flight import remember
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World


def main() -> None:
    env = RankEnv.from_environ(os.environ)
    log_to_stderr(logging.INFO, rank=env.rank)
    remember(2000, os.environ)
    with World.join(env, timeout_seconds=60) as world:
        for scenario in json.loads(sys.argv[1]):
            sys.stdout.write(json.dumps({"scenario": scenario["name"]}) + "\n")
            told = replace(env, tensorboard_dir=scenario.get("tensorboard_dir", ""))
            config = parse_args([f"--config={scenario['config']}"])
            Trainer(config, replace(world, env=told), Preemption()).fit()


if __name__ == "__main__":
    main()
