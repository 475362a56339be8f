"""Judge a job spec that somebody wrote or compiled: whatever document it stands in, every fault in one pass.

CustomJob, CustomJobSpec (the file of `gcloud ai custom-jobs create --config`), HyperparameterTuningJob,
a compiled pipeline: in JSON or YAML, snake_case or camelCase
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock_components.jobs.documents import DocumentError, parse
from penstock_components.jobs.findings import Case, Finding, in_case
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message
from penstock_components.jobs.pipeline_ir import training_jobs
from penstock_components.jobs.program import strategy_of
from penstock_components.jobs.reader import Reading, read
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_custom_job, check_job_spec, check_tuning_job
from penstock_components.jobs.wire import case_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a document is, and what is wrong with it."""

    kind: str
    """CustomJob, CustomJobSpec, HyperparameterTuningJob or pipeline; "" where it could not be told."""
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)


def check_text(text: str, *, name: str = "", context: Context | None = None) -> Report:
    """Judge the text of a file. Raises nothing: what cannot be read is a finding too."""
    try:
        document = parse(text, name=name)
    except DocumentError as exc:
        return Report(kind="", findings=(exc.finding,))
    return check_document(document, context=context)


def check_document(document: object, *, context: Context | None = None) -> Report:
    """Judge a parsed document. Paths have the case in which it is written."""
    context = context or Context()
    kind = kind_of_document(document)
    if kind == "pipeline" and isinstance(document, Mapping):
        return Report(kind=kind, findings=tuple(check_pipeline(document, context)))
    if not kind:
        return Report(kind="", findings=(_unknown_document(document),))
    case = case_of(document)
    findings = check_message(_message_class(kind), document, case=case, context=context)
    return Report(
        kind=kind, findings=tuple(replace(each, path=in_case(each.path, case)) for each in findings)
    )


def refusals(job: Mapping[str, Any]) -> list[str]:
    """Errors of a CustomJob as REST JSON, as `penstock check` words them; what the stand-in's --job-validator takes."""
    return [each.told() for each in check_document(job).findings if each.severity == "error"]


def kind_of_document(document: object) -> str:
    """What a document is, by the fields at its top; "" when none of ours is there."""
    if not isinstance(document, Mapping):
        return ""
    marks = {
        "pipeline": {"pipelineSpec", "pipeline_spec", "deploymentSpec", "deployment_spec", "pipelineInfo"},
        "HyperparameterTuningJob": {"trialJobSpec", "trial_job_spec", "studySpec", "study_spec"},
        "CustomJob": {"jobSpec", "job_spec"},
        "CustomJobSpec": {"workerPoolSpecs", "worker_pool_specs"},
    }
    return next((kind for kind, keys in marks.items() if keys & set(document)), "")


def check_message(kind: type[Message], value: object, *, case: Case, context: Context) -> list[Finding]:
    """Faults of form and of content of one message, in the proto's own names, by path."""
    reading: Reading[Any] = read(kind, value, case=case)
    message = reading.message
    if isinstance(message, CustomJob):
        judged = check_custom_job(message, _knowing(context, message.job_spec))
    elif isinstance(message, CustomJobSpec):
        judged = check_job_spec(message, _knowing(context, message))
    else:
        judged = check_tuning_job(message, _knowing(context, message.trial_job_spec))
    return [*reading.findings, *(each for each in judged if not _is_unread(each.path, reading.unread))]


def check_pipeline(document: Mapping[str, Any], context: Context) -> Iterable[Finding]:
    """Every training job of a compiled pipeline, as far as it is decided when the pipeline is compiled."""
    for job in training_jobs(document):
        yield from job.findings
        if job.document is None:
            continue
        through_gcpc = replace(context, through_gcpc=True)
        found = check_message(_message_class(job.kind), job.document, case="snake", context=through_gcpc)
        yield from (replace(each, path=job.path_of(each.path)) for each in found)


def _message_class(kind: str) -> type[Message]:
    if kind == "CustomJob":
        return CustomJob
    if kind == "CustomJobSpec":
        return CustomJobSpec
    from penstock_components.jobs.study import (
        HyperparameterTuningJob,
    )  # its messages are many, and few files need them

    return HyperparameterTuningJob


def _knowing(context: Context, spec: CustomJobSpec | None) -> Context:
    """The context with the strategy of the trainer that the job runs, where it runs ours."""
    if context.strategy or spec is None:
        return context
    return replace(context, strategy=strategy_of(spec))


def _is_unread(path: str, unread: frozenset[str]) -> bool:
    """Whether a rule judges a value that could not be made out, which has been told already."""
    return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in unread)


def _unknown_document(document: object) -> Finding:
    top = (
        ", ".join(map(str, list(document)[:8])) if isinstance(document, Mapping) else type(document).__name__
    )
    return Finding(
        path="",
        rule="unknown-document",
        reason=f"it is neither a job nor a compiled pipeline; at its top there is {top or 'nothing'}.",
        fix="Give a CustomJob (jobSpec), a CustomJobSpec (workerPoolSpecs), a HyperparameterTuningJob (trialJobSpec) or the "
        "YAML that `penstock compile` or `kfp dsl compile` wrote.",
    )
