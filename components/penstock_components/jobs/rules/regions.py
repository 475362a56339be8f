"""Regions that have an accelerator, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import catalogue_date, regions_of


def check_region(path: str, name: str, context: Context) -> Iterator[Finding]:
    """That the job's region has an accelerator type, or a TPU's machine type."""
    regions = regions_of(name)
    if context.location and regions is not None and context.location not in regions:
        yield Finding(
            path=path,
            rule="region",
            reason=f"the quota page (catalogue of {catalogue_date()}) has no {name} in {context.location}.",
            fix=f"It has it in {', '.join(regions)}.",
            severity="warning",
        )
