"""Golden files: what we send, without descriptions and the SDK's version, which say nothing about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compiled import compiled
from golden.jobs_we_send import JOBS
from penstock_components.jobs.review import normalised
from penstock_components.jobs.wire import to_api
from penstock_pipelines.recipes import RECIPES

GOLDEN = Path(__file__).parent


def documents() -> dict[str, Any]:
    """By path below tests/golden, everything that is kept: pipelines of all recipes, and CustomJobs in camelCase."""
    pipelines = {f"{name}.yaml": yaml.safe_load(compiled(name).read_text()) for name in RECIPES}
    jobs = {f"jobs/{name}.yaml": to_api(make(), "camel") for name, make in JOBS.items()}
    return {path: normalised(document) for path, document in (pipelines | jobs).items()}


def written(document: Any) -> str:
    """As it stands in the file."""
    text: str = yaml.safe_dump(document, sort_keys=True, width=120)
    return text
