"""The pipeline that `kfp dsl compile` compiles in bench_compile: our pretrain pipeline of the recipe in BENCH_RECIPE."""

import os

from penstock_pipelines.pretrain import build_pipeline
from penstock_pipelines.recipes import find_recipe
from penstock_pipelines.settings import load_settings

_SETTINGS = load_settings(None)
pipeline = build_pipeline(
    _SETTINGS.images, find_recipe(os.environ.get("BENCH_RECIPE", "tiny-zero2")), location=_SETTINGS.location
)
