"""What a hyperparameter tuning job searches: metrics, parameters, trials. As the API's own descriptions have it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec
from penstock_components.jobs.rules.contents import programs
from penstock_components.jobs.rules.identity import check_resource
from penstock_components.jobs.rules.parameters import (
    all_parameters,
    check_ids,
    check_parameter,
    missing,
    unsupported,
)
from penstock_components.jobs.study import HyperparameterTuningJob, MetricSpec, StudySpec

_TEMPLATE = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")


def check(job: HyperparameterTuningJob) -> Iterator[Finding]:
    """The job's name and labels, its study, its numbers of trials, and the trials' arguments."""
    yield from check_resource(job.display_name, job.labels, job.encryption_spec)
    yield from _counts(job)
    study = job.study_spec
    if study is None:
        yield missing("study_spec", "Give metrics and parameters.")
        return
    yield from _metrics(study.metrics)
    yield from _parameters(study)
    if study.observation_noise:
        yield unsupported("study_spec.observation_noise")
    ids = {each.parameter_id for _, each in all_parameters("", study.parameters)}
    yield from _arguments(job.trial_job_spec or CustomJobSpec(), ids)


def _counts(job: HyperparameterTuningJob) -> Iterator[Finding]:
    if job.max_trial_count < 1:
        yield _count(
            "max_trial_count", job.max_trial_count, "Write how many trials the study has in all, 1 or more."
        )
    if job.parallel_trial_count < 1:
        yield _count(
            "parallel_trial_count",
            job.parallel_trial_count,
            "Write how many trials run at a time, 1 or more.",
        )
    elif job.parallel_trial_count > job.max_trial_count >= 1:
        yield Finding(
            path="parallel_trial_count",
            rule="trial-count",
            reason=f"{job.parallel_trial_count} trials at a time are more than the {job.max_trial_count} of max_trial_count.",
            fix=f"Write {job.max_trial_count} or less; fewer at a time learn more from each other.",
        )
    if job.max_failed_trial_count < 0:
        yield _count(
            "max_failed_trial_count",
            job.max_failed_trial_count,
            "Write 0 for the service's own choice, or more.",
        )


def _count(path: str, count: int, fix: str) -> Finding:
    return Finding(path=path, rule="trial-count", reason=f"it is {count}.", fix=fix)


def _metrics(metrics: Sequence[MetricSpec]) -> Iterator[Finding]:
    path = "study_spec.metrics"
    if not metrics:
        yield missing(path, "Name the metric that the trials report, and its goal.")
    yield from check_ids(
        "metric_id", [(f"{path}[{index}]", metric.metric_id) for index, metric in enumerate(metrics)]
    )
    for index, metric in enumerate(metrics):
        if not metric.goal:
            yield Finding(
                path=f"{path}[{index}].goal",
                rule="metric-goal",
                reason="it is missing, and would be taken for MAXIMIZE.",
                fix="Write MAXIMIZE or MINIMIZE.",
            )
        safety = metric.safety_config
        fraction = safety.desired_min_safe_trials_fraction if safety is not None else None
        if fraction is not None and not 0 <= fraction <= 1:
            yield Finding(
                path=f"{path}[{index}].safety_config.desired_min_safe_trials_fraction",
                rule="metric-safety",
                reason=f"{fraction} is no fraction.",
                fix="Write 0 to 1.",
            )
    if metrics and all(metric.safety_config is not None for metric in metrics):
        yield Finding(
            path=path,
            rule="metric-safety",
            reason="every metric is a constraint (safety_config); none is left to be tuned for.",
            fix="Add the metric that is the goal, without safety_config.",
        )


def _parameters(study: StudySpec) -> Iterator[Finding]:
    path = "study_spec.parameters"
    if not study.parameters:
        yield missing(path, "Give at least one parameter.")
    yield from check_ids(
        "parameter_id", ((at, each.parameter_id) for at, each in all_parameters(path, study.parameters))
    )
    for index, parameter in enumerate(study.parameters):
        yield from check_parameter(f"{path}[{index}]", parameter, study.algorithm)


def _arguments(spec: CustomJobSpec, ids: set[str]) -> Iterator[Finding]:
    """The service appends `--<parameter_id>=<value>`; what stands there already is sent as it is, beside it."""
    for program in programs(spec):
        for path, word in program.words():
            template = next((match[1] for match in _TEMPLATE.finditer(word)), "")
            option = re.match(r"--?([^=\s]+)", word)
            if template:
                yield Finding(
                    path=f"trial_job_spec.{path}",
                    rule="argument-template",
                    reason=f"{{{{{template}}}}} would reach the program as it stands: nothing puts values into arguments.",
                    fix=f"Remove the argument: the service appends --{template}=<value> for the parameter of that ID.",
                )
            elif option is not None and option[1] in ids:
                yield Finding(
                    path=f"trial_job_spec.{path}",
                    rule="argument-twice",
                    reason=f"{option[1]} is a parameter of the study: the service appends --{option[1]}=<value> behind this one.",
                    fix="Remove it, so that no program has to choose.",
                    severity="warning",
                )
