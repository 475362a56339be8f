"""A node's launcher as `python -m penstock_trainer launch --nodes=...` starts it, with short waits.

`python -m distributed.elastic_launch MIN:MAX MAX_RESTARTS COMMAND...`
"""

from __future__ import annotations

import logging
import os
import sys

from penstock_trainer.elastic import launch_elastic
from penstock_trainer.watch import Timing

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    nodes, max_restarts, *command = sys.argv[1:]
    timing = Timing(
        join_seconds=60.0,
        save_seconds=5.0,
        beat_seconds=1.0,
        silence_seconds=3.0,
        farewell_seconds=1.0,
        poll_seconds=0.1,
    )
    sys.exit(
        launch_elastic(
            command,
            os.environ,
            nodes=nodes,
            max_restarts=int(max_restarts),
            timing=timing,
            last_call_seconds=1,
        )
    )
