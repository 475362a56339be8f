"""Regions that have an accelerator, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.rules.contents import is_placeholder
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import catalogue_date, regions_of


def check_region(path: str, name: str, context: Context) -> Iterator[Finding]:
    """That the job's region has an accelerator type, or a TPU's machine type."""
    regions = regions_of(name)
    is_known = bool(context.location) and not is_placeholder(context.location)
    if is_known and regions is not None and context.location not in regions:
        yield Finding(
            path=path,
            rule="region",
            reason=f"the quota page (catalogue of {catalogue_date()}) has no {name} in {context.location}.",
            fix=f"It has it in {', '.join(regions)}.",
            severity="warning",
        )
