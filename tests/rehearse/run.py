"""`penstock run RECIPE --faults` with each file of pipelines/examples/faults, and one table of all.

Run:  python tests/rehearse/run.py [RECIPE [FILE ...]]

The files share a clean run. hang.yaml takes as long as the recipe's collectives may, ten minutes, and is left out unless it
is named; tests/e2e/test_faults.py has it with five seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from penstock_pipelines.fault_evidence import Row
from penstock_pipelines.faults_table import print_rows

ROOT = Path(__file__).parents[2]
FILES = ROOT / "pipelines" / "examples" / "faults"
STATE = ROOT / "build" / "rehearsal"


def rehearse(recipe: str, faults: Path) -> tuple[int, list[Row]]:
    """Exit code and rows of one file."""
    command = [sys.executable, "-m", "penstock_pipelines.cli", "run", recipe, "--state", str(STATE), "--json"]
    command += [
        "--prepare",
        str(ROOT / "pipelines" / "examples" / "stdlib_corpus.py"),
        "--faults",
        str(faults),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    at = done.stdout.find("{\n")
    told = json.loads(done.stdout[at:]) if at >= 0 else {"faults": []}
    return done.returncode, [Row(**row) for row in told["faults"]]


def main(recipe: str, files: list[Path]) -> int:
    """1 when a file's run was not as it must be."""
    rows, failed = [], []
    for faults in files:
        print(f"== {faults.name}", flush=True)
        code, found = rehearse(recipe, faults)
        rows += found
        failed += [faults.name] if code else []
    print_rows(Console(), rows)
    print(f"not as it must be: {', '.join(failed)}" if failed else f"{len(rows)} faults, all as it must be")
    return int(bool(failed))


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[2:]]
    everything = [path for path in sorted(FILES.glob("*.yaml")) if path.stem != "hang"]
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "tiny-fsdp", chosen or everything))
