"""How the non-test lines divide between suite, trainer and stand-in: the suite is the product, the stand-in its proving ground.

Run:  python tests/architecture/proportion.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("components", "pipelines", "trainer_image", "local_vertex")
LARGEST_SHARE = 0.35


def lines_of(part: str) -> int:
    """Lines of Python in one top-level folder that are not blank."""
    files = (ROOT / part).rglob("*.py")
    return sum(1 for file in files for line in file.read_text().splitlines() if line.strip())


def main() -> int:
    """Print the shares; 1 when the stand-in has more than its share."""
    counts = {part: lines_of(part) for part in PARTS}
    total = sum(counts.values())
    for part, count in counts.items():
        print(f"{part:14} {count:6}  {count / total:5.1%}")
    share = counts["local_vertex"] / total
    print(f"local_vertex is {share:.1%} of {total} lines; the bound is {LARGEST_SHARE:.0%}")
    return int(share > LARGEST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
