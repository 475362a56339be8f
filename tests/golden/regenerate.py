"""Write the golden files anew: `python tests/golden/regenerate.py`, then read the diff."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_compiled_pipelines import GOLDEN, RECIPES, ROOT, compile_in

if __name__ == "__main__":
    for recipe in RECIPES:
        compile_in(ROOT, recipe, GOLDEN / f"{recipe}.yaml", hash_seed="0")
