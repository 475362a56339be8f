"""Plant each fault of this folder, one at a time, and show that the tests turn red: `make test-faults`.

A fault is a patch of the trainer with two lines in front: what it breaks, and the tests that must notice. It is applied to a
copy; the tests run against the copy. Exit code 1 if a fault goes unnoticed or no longer applies.

    python tests/numerics/faults/run.py [name of a patch ...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TESTS_FAILED = 1
"""pytest's exit code when tests ran and some failed; 2 and more are errors of another kind."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault."""

    patch: Path
    breaks: str
    caught_by: tuple[str, ...]
    """Arguments of pytest."""

    @classmethod
    def read(cls, patch: Path) -> Fault:
        """Raises ValueError when the first two lines are not what they must be."""
        match = re.match(r"Breaks: (.+)\nCaught by: (.+)\n", patch.read_text())
        if match is None:
            raise ValueError(
                f"{patch.name} must begin with the lines 'Breaks: ...' and 'Caught by: <tests>'."
            )
        return cls(patch, match[1], tuple(match[2].split()))

    def verdict(self) -> tuple[bool, str]:
        """Whether the tests noticed, and the first line that says how."""
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory)
            for name in ("trainer_image", "tests"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            applied = subprocess.run(
                ["patch", "-p1", "--fuzz=0", "-i", str(self.patch)],
                cwd=copy,
                capture_output=True,
                text=True,
                check=False,
            )
            if applied.returncode:
                return False, f"does not apply: {applied.stdout.strip().splitlines()[-1]}"
            return self._run_tests(copy)

    def _run_tests(self, copy: Path) -> tuple[bool, str]:
        path = os.pathsep.join([str(copy / "trainer_image"), str(copy / "tests")])
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "not full", *self.caught_by],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        told = lines[0] if lines else f"pytest ended with {ran.returncode}"
        return ran.returncode == TESTS_FAILED, told[:150]


def main(names: Sequence[str]) -> int:
    """Run the named faults, or all."""
    faults = [Fault.read(path) for path in sorted(HERE.glob("*.patch")) if not names or path.stem in names]
    unnoticed = 0
    for fault in faults:
        began = time.monotonic()
        noticed, told = fault.verdict()
        unnoticed += not noticed
        verdict = "noticed  " if noticed else "UNNOTICED"
        print(
            f"{verdict} {fault.patch.stem} ({time.monotonic() - began:.0f} s): {fault.breaks}\n          {told}",
            flush=True,
        )
    print(f"{len(faults) - unnoticed} of {len(faults)} planted faults were noticed")
    return 1 if unnoticed or not faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
