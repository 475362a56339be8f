"""From a recipe to the compiled pipeline: the same bytes whenever and wherever the same recipe is compiled."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kfp import compiler

from penstock_pipelines.images import Images
from penstock_pipelines.pretrain import build_pipeline
from penstock_pipelines.recipe import Recipe


def compile_recipe(
    recipe: Recipe, images: Images, output: Path, *, location: str, allow_tags: bool = False
) -> str:
    """Write the pipeline's YAML to `output`; returns the SHA-256 of its bytes, in hex.

    Raises ImageError when one of our images has no digest and tags are not allowed.
    """
    if not allow_tags:
        images.require_digests()
    output.parent.mkdir(parents=True, exist_ok=True)
    pipeline = build_pipeline(images, recipe, location=location)
    compiler.Compiler().compile(pipeline, str(output))
    return sha256_of(output)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
