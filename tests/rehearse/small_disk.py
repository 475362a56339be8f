"""Train onto a disk that is too small: `unshare -rm python small_disk.py DIRECTORY CONFIG`.

DIRECTORY becomes a tmpfs that only this program sees. Prints what became of it as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock_trainer.checkpoint_root import CheckpointRoot

SIZE_BYTES = 6_000_000
"""Room for three checkpoints of the run and a half."""


def main(directory: Path, config: str) -> None:
    """Mount, train, and look at what is left."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "none", str(directory)]
    subprocess.run(mount, check=True)
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config}"]
    trained = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    root = CheckpointRoot((directory / "root").as_uri())
    conditions = {step: root.state(step).condition for step in root.steps()}
    told = {
        "exit_code": trained.returncode,
        "output": trained.stdout + trained.stderr,
        "conditions": conditions,
    }
    print("RESULT " + json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
