"""Judge a job spec that somebody wrote or compiled: whatever document it stands in, every fault in one pass.

CustomJob, CustomJobSpec (the file of `gcloud ai custom-jobs create --config`), HyperparameterTuningJob,
a compiled pipeline: in JSON or YAML, snake_case or camelCase
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock_components.jobs.documents import DocumentError, parse
from penstock_components.jobs.findings import Case, Finding, in_case, quoted
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message, WorkerPoolSpec
from penstock_components.jobs.pipeline_ir import PipelineJobTask, is_within, spec_of, training_jobs
from penstock_components.jobs.program import strategy_of
from penstock_components.jobs.reader import Reading, read
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_custom_job, check_job_spec, check_tuning_job
from penstock_components.jobs.scalars import nearest, told
from penstock_components.jobs.schema import fields_of, snake_name
from penstock_components.jobs.wire import case_of

_MARKS: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("pipelineSpec", "pipeline_spec", "deploymentSpec", "deployment_spec", "pipelineInfo"),
    "HyperparameterTuningJob": ("trialJobSpec", "trial_job_spec", "studySpec", "study_spec"),
    "CustomJob": ("jobSpec", "job_spec"),
    "CustomJobSpec": ("workerPoolSpecs", "worker_pool_specs"),
}
"""Fields at the top by which a document is told; the first kind that has one."""
_WRAPPERS = {
    "customJob": "CustomJob",
    "custom_job": "CustomJob",
    "hyperparameterTuningJob": "HyperparameterTuningJob",
    "hyperparameter_tuning_job": "HyperparameterTuningJob",
    "pipelineJob": "pipeline",
    "pipeline_job": "pipeline",
}
"""Of Google's clients' requests; REST and gcloud take what is in them."""
_OF_POOLS = {
    *("machineSpec", "machine_spec", "containerSpec", "container_spec"),
    *("pythonPackageSpec", "python_package_spec", "replicaCount", "replica_count"),
}
_MOST_KEYS = 50
"""At the top, among which typing errors are looked for."""
_NEAR = 0.8
"""As difflib measures it; the reader takes no less for a typing error."""
_FIELD_NAMES = re.compile(
    r"""(?<!\w)(?:'[^']*'|"[^"]*"|`[^`]*`)|(?<![\w$-])([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?![\w-])"""
)
"""What is quoted, which is left alone, or else a word that may name a field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a document is, and what is wrong with it."""

    kind: str
    """CustomJob, CustomJobSpec, HyperparameterTuningJob or pipeline; "" where it could not be told."""
    findings: tuple[Finding, ...]
    num_jobs: int = 0
    """Training jobs that it holds. A pipeline may hold any number; those that it makes while it runs are counted too."""

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
    """Judge a parsed document. Paths, and fields that are spoken of, have the case in which it is written.

    What is plainly meant for a job, though none in form, is told so in one finding and judged as what is meant.
    """
    context = context or Context()
    if isinstance(document, list) and _are_pools(document):
        return _judged_pools(document, context)
    if isinstance(document, Mapping):
        kind = kind_of_document(document)
        if kind:
            return _judged(kind, document, context)
        kind, case = _misspelt(document)
        if kind:
            return _judged(kind, document, context, case=case)
        key = next((name for name in _WRAPPERS if isinstance(document.get(name), Mapping)), "")
        if key:
            held = document[key]
            return _wrapped(key, _judged(kind_of_document(held) or _WRAPPERS[key], held, context))
    return Report(kind="", findings=(_unknown_document(document),))


def refusals(job: Mapping[str, Any]) -> list[str]:
    """Errors of a CustomJob as REST JSON, as `penstock check` words them; what the stand-in's --job-validator takes."""
    return [each.told() for each in check_document(job).findings if each.severity == "error"]


def kind_of_document(document: object) -> str:
    """What a document is, by the fields at its top; "" when none of ours is there."""
    if not isinstance(document, Mapping):
        return ""
    return next((kind for kind, keys in _MARKS.items() if any(key in document for key in keys)), "")


def check_message(
    kind: type[Message],
    value: object,
    *,
    case: Case,
    context: Context,
    unknown: frozenset[str] = frozenset(),
) -> list[Finding]:
    """Faults of form and of content of one message, in the proto's own names, by path.

    `unknown` are paths, from the message down, of what is not decided yet: nothing is said of them, and rules are told.
    """
    reading: Reading[Any] = read(kind, value, case=case)
    message, undecided = reading.message, unknown | reading.unread
    if isinstance(message, CustomJob):
        judged = check_custom_job(message, _knowing(context, message.job_spec, "job_spec.", undecided))
    elif isinstance(message, CustomJobSpec):
        judged = check_job_spec(message, _knowing(context, message, "", undecided))
    else:
        judged = check_tuning_job(
            message, _knowing(context, message.trial_job_spec, "trial_job_spec.", undecided)
        )
    found = [*reading.findings, *(each for each in judged if not _is_below(each.path, reading.unread))]
    return [each for each in found if not _is_below(each.path, unknown)]


def check_pipeline(document: Mapping[str, Any], context: Context) -> Report:
    """Every training job of a compiled pipeline, as far as it is decided when the pipeline is compiled."""
    if not spec_of(document):
        return Report(kind="pipeline", findings=(_no_pipeline(document),))
    jobs = list(training_jobs(document))
    found = [finding for job in jobs for finding in (*job.findings, *_check_task(job, context))]
    return Report(kind="pipeline", findings=tuple(dict.fromkeys(found)), num_jobs=len(jobs))


def _check_task(job: PipelineJobTask, context: Context) -> Iterator[Finding]:
    if job.document is None:
        return
    location = context.location if job.location is None else job.location
    context = replace(context, through_gcpc=job.is_op, location=location)
    kind = _message_class(job.kind)
    found = check_message(kind, job.document, case="snake", context=context, unknown=job.unknown)
    for each in found:
        if not job.carries(each.path):
            each = _not_carried(each, job.kind)
        yield replace(each, path=job.path_of(each.path))


def _not_carried(finding: Finding, kind: str) -> Finding:
    """A fault that nobody can mend where it is: the op leaves the field at its default."""
    fix = "HyperparameterTuningJobRunOp has no input for it: to set it, send the study with the SDK or REST."
    if kind == "CustomJob":
        fix = "This op has no input for it: take google-cloud-pipeline-components' newest v1 CustomTrainingJobOp, or send the job with the SDK or REST."
    return replace(finding, severity="warning", fix=fix)


def _judged(
    kind: str,
    document: Mapping[str, Any],
    context: Context,
    *,
    case: Case | None = None,
    unknown: frozenset[str] = frozenset(),
) -> Report:
    if kind == "pipeline":
        return check_pipeline(document, context)
    message = _message_class(kind)
    case = case or case_of(document, message)
    found = check_message(message, document, case=case, context=context, unknown=unknown)
    return Report(kind=kind, findings=tuple(_in_case(found, message, case)), num_jobs=1)


def _judged_pools(pools: list[Any], context: Context) -> Report:
    """A bare list of worker pools; of the rest of the job nothing is said."""
    case = case_of(pools, WorkerPoolSpec)
    name = in_case("worker_pool_specs", case)
    rest = {path for path in _paths(CustomJobSpec, "", 2) if not is_within(path, "worker_pool_specs")}
    report = _judged("CustomJobSpec", {name: pools}, context, case=case, unknown=frozenset(rest))
    finding = Finding(
        path="",
        rule="document-form",
        reason="it is a bare list of worker pools, and no job.",
        fix=f"Write {name}: before it, and the rest of the job's spec beside it.",
    )
    return replace(report, findings=(finding, *report.findings))


def _are_pools(document: list[Any]) -> bool:
    return bool(document) and all(isinstance(each, Mapping) and _OF_POOLS & set(each) for each in document)


def _wrapped(key: str, report: Report) -> Report:
    finding = Finding(
        path=key,
        rule="document-form",
        reason=f"the {report.kind} stands inside {key}; what is sent to Google's API and to gcloud is the job itself.",
        fix=f"Remove {key}, and leave what is in it.",
    )
    inside = (replace(each, path=f"{key}.{each.path}".rstrip(".")) for each in report.findings)
    return replace(report, findings=(finding, *inside))


def _misspelt(document: Mapping[str, Any]) -> tuple[str, Case]:
    """The kind of job whose mark stands at the top with a typing error, which the reader tells and mends, and its case."""
    for key in list(document)[:_MOST_KEYS]:
        kind, mark = _nearest(key)
        if kind not in ("", "pipeline"):
            return kind, case_of({mark: document[key]}, _message_class(kind))
    return "", "snake"


def _nearest(key: object) -> tuple[str, str]:
    """The kind and the mark that a key at the top may have been meant for; "" when there is none near."""
    marks = {mark: kind for kind, names in _MARKS.items() for mark in names}
    words = (key, snake_name(key)) if isinstance(key, str) else ()
    near = next((mark for word in words if (mark := nearest(word, list(marks), cutoff=_NEAR))), "")
    return marks.get(near, ""), near


def _in_case(findings: Iterable[Finding], message: type[Message], case: Case) -> Iterator[Finding]:
    """The same with fields named as the document has them, in paths and in what is said."""
    if case == "snake":
        yield from findings
        return
    names = _names(cast("Any", message))  # mypy takes no class for hashable whose instances may not be

    def named(match: re.Match[str]) -> str:
        return in_case(match[0], case) if match[1] in names else match[0]

    for each in findings:
        reason, fix = (_FIELD_NAMES.sub(named, text) for text in (each.reason, each.fix))
        yield replace(each, path=in_case(each.path, case), reason=reason, fix=fix)


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    """The names of all fields of a message and of what it holds."""
    names: set[str] = set()
    kinds: list[Any] = [kind]
    for held in kinds:
        names.update(each.name for each in fields_of(held))
        kinds += [each.type for each in fields_of(held) if each.is_message and each.type not in kinds]
    return frozenset(names)


def _paths(kind: type[Message], path: str, levels: int) -> Iterator[str]:
    for each in fields_of(kind):
        yield f"{path}{each.name}"
        if levels > 1 and each.is_message and not each.is_repeated:
            yield from _paths(each.type, f"{path}{each.name}.", levels - 1)


def _message_class(kind: str) -> type[Message]:
    if kind == "CustomJob":
        return CustomJob
    if kind == "CustomJobSpec":
        return CustomJobSpec
    from penstock_components.jobs.study import (
        HyperparameterTuningJob,
    )  # its messages are many, and few files need them

    return HyperparameterTuningJob


def _knowing(context: Context, spec: CustomJobSpec | None, place: str, unknown: frozenset[str]) -> Context:
    """The context with what is unknown of the job spec, and the strategy of the trainer that it runs, where that is ours."""
    below = frozenset(path.removeprefix(place) for path in unknown if path.startswith(place))
    strategy = context.strategy or (strategy_of(spec) if spec is not None else "")
    return replace(context, strategy=strategy, unknown=context.unknown | below)


def _is_below(path: str, holders: frozenset[str]) -> bool:
    """Whether a finding is about any of these or what they hold."""
    return any(is_within(path, each) for each in holders)


def _no_pipeline(document: Mapping[str, Any]) -> Finding:
    name = "pipelineSpec" if "pipelineSpec" in document else "pipeline_spec"
    return Finding(
        path=name,
        rule="pipeline-spec",
        reason=f"it is {_told(document.get(name))}; it holds the compiled pipeline itself.",
        fix="Put what `penstock compile` or `kfp dsl compile` wrote there; an address goes into templateUri, and check that file.",
    )


def _told(value: object) -> str:
    return "empty" if value is None or value in ("", {}, []) else told(value)


def _unknown_document(document: object) -> Finding:
    fix = (
        "Give a CustomJob (jobSpec), a CustomJobSpec (workerPoolSpecs), a HyperparameterTuningJob (trialJobSpec) or the "
        "YAML that `penstock compile` or `kfp dsl compile` wrote."
    )
    reason = f"it is {_told(document)}, neither a job nor a compiled pipeline."
    if isinstance(document, Mapping) and document:
        keys = [key for key in document if isinstance(key, str)]
        at_top = quoted(", ".join(keys[:8])) if keys else "no name"
        reason = f"it is neither a job nor a compiled pipeline; at its top there is {at_top}."
        near = [(key, _nearest(key)[1]) for key in keys[:_MOST_KEYS]]
        fix = next((f"Did you mean {mark} by {quoted(key)}? {fix}" for key, mark in near if mark), fix)
    return Finding(path="", rule="unknown-document", reason=reason, fix=fix)
