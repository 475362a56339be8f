"""All rules over a job: what `check`, a recipe and the stand-in ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJob, CustomJobSpec
from penstock_components.jobs.rules import (
    identity,
    machines,
    network,
    pools,
    reducers,
    reservations,
    scheduling,
    secrets,
    storage,
    tpus,
)
from penstock_components.jobs.rules.contents import undecided
from penstock_components.jobs.rules.context import Context

if TYPE_CHECKING:
    from penstock_components.jobs.study import HyperparameterTuningJob

_RULES = (
    pools.check,
    machines.check,
    tpus.check,
    reservations.check,
    storage.check,
    scheduling.check,
    network.check,
    reducers.check,
    secrets.check,
    identity.check,
)


def check_job_spec(spec: CustomJobSpec, context: Context) -> list[Finding]:
    """Everything that is wrong with what a job runs, errors and warnings."""
    context = replace(context, unknown=context.unknown | undecided(spec))
    found = (finding for rule in _RULES for finding in rule(spec, context))
    return [finding for finding in found if not context.is_later(finding.path)]


def check_custom_job(job: CustomJob, context: Context) -> list[Finding]:
    """The same for a whole CustomJob; paths begin at the job."""
    return [*identity.check_job(job), *_below("job_spec", job.job_spec, context)]


def check_tuning_job(job: HyperparameterTuningJob, context: Context) -> list[Finding]:
    """The same for a HyperparameterTuningJob, its study included."""
    from penstock_components.jobs.rules import studies  # its messages are many, and few jobs need them

    return [*studies.check(job), *_below("trial_job_spec", job.trial_job_spec, context)]


def _below(field: str, spec: CustomJobSpec | None, context: Context) -> Iterator[Finding]:
    if spec is None:
        yield Finding(
            path=field, rule="required", reason="it is missing.", fix="Give the spec of what the job runs."
        )
        return
    for finding in check_job_spec(spec, context):
        yield replace(finding, path=f"{field}.{finding.path}".rstrip("."))
