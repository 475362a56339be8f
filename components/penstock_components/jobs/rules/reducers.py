"""Reduction Server."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec
from penstock_components.jobs.rules.context import Context


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:  # noqa: ARG001
    """Reduction Server."""
    if False:
        yield Finding(path="worker_pool_specs[2]", rule="reducers", reason="", fix="")
