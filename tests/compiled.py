"""Our recipes as compiled, for tests that need a pipeline's file."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from penstock_pipelines.compile import compile_recipe
from penstock_pipelines.recipes import find_recipe
from penstock_pipelines.settings import load_settings

ROOT = Path(__file__).parents[1]


@functools.cache
def compiled(recipe: str) -> Path:
    """The YAML of a recipe with the repository's settings; compiled once for each process that tests."""
    settings = load_settings(ROOT / "penstock.toml")
    path = Path(tempfile.mkdtemp(prefix="penstock-compiled-")) / f"{recipe}.yaml"
    compile_recipe(find_recipe(recipe), settings.images, path, location=settings.location, allow_tags=True)
    return path
