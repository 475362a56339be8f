"""Stands for a Reduction Server replica: follows its pool's life and reduces nothing, and says so.

Google's reducer speaks NCCL's network to GPUs; there is nothing of it to run on a machine without them.
Run by the stand-in as `python -m penstock_local.jobs.reduction_placeholder`.
"""

from __future__ import annotations

import json
import signal
import sys

MESSAGE = "placeholder of the Reduction Server: it follows the pool's life and reduces nothing"


def main() -> None:
    """Say what this is, then wait for SIGTERM, which comes when the primary is done."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    sys.stdout.write(json.dumps({"severity": "NOTICE", "message": MESSAGE}) + "\n")
    sys.stdout.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
