"""A node's launcher as `python -m penstock_trainer` starts it, for the ranks of launch_ranks.py and with short waits."""

from __future__ import annotations

import logging
import os
import sys

from penstock_trainer.launch import launch_trainer
from penstock_trainer.outcome import RETRYABLE
from penstock_trainer.rendezvous import RendezvousError
from penstock_trainer.watch import Timing

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    timing = Timing(
        join_seconds=30.0,
        save_seconds=3.0,
        peer_seconds=3.0,
        beat_seconds=0.2,
        silence_seconds=2.0,
        poll_seconds=0.1,
    )
    try:
        code = launch_trainer(sys.argv[1:], os.environ, rank_module="distributed.launch_ranks", timing=timing)
    except RendezvousError:
        logging.exception("no rendezvous")
        code = RETRYABLE
    sys.exit(code)
