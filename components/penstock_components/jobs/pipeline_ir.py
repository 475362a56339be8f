"""Finds the training jobs in a compiled pipeline (kfp's intermediate representation, schema 2.1).

A task whose container is GCPC's launcher of a CustomJob or of a HyperparameterTuningJob is one. Its inputs, as far as they are
constants, make the job; constants are followed through the sub-pipelines that hand them down.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.reader import PLACEHOLDER

JobKind = Literal["CustomJob", "HyperparameterTuningJob"]
_Fields = Mapping[str, tuple[str, ...]]
"""Of a job, by input of the op that makes it."""

_CUSTOM_JOB: _Fields = {
    "display_name": ("display_name",),
    "worker_pool_specs": ("job_spec", "worker_pool_specs"),
    "timeout": ("job_spec", "scheduling", "timeout"),
    "restart_job_on_worker_restart": ("job_spec", "scheduling", "restart_job_on_worker_restart"),
    "strategy": ("job_spec", "scheduling", "strategy"),
    "max_wait_duration": ("job_spec", "scheduling", "max_wait_duration"),
    "service_account": ("job_spec", "service_account"),
    "tensorboard": ("job_spec", "tensorboard"),
    "enable_web_access": ("job_spec", "enable_web_access"),
    "network": ("job_spec", "network"),
    "reserved_ip_ranges": ("job_spec", "reserved_ip_ranges"),
    "psc_interface_config": ("job_spec", "psc_interface_config"),
    "base_output_directory": ("job_spec", "base_output_directory", "output_uri_prefix"),
    "persistent_resource_id": ("job_spec", "persistent_resource_id"),
    "labels": ("labels",),
    "encryption_spec_key_name": ("encryption_spec", "kms_key_name"),
}
_TUNING_JOB: _Fields = {
    "display_name": ("display_name",),
    "worker_pool_specs": ("trial_job_spec", "worker_pool_specs"),
    "service_account": ("trial_job_spec", "service_account"),
    "network": ("trial_job_spec", "network"),
    "base_output_directory": ("trial_job_spec", "base_output_directory", "output_uri_prefix"),
    "study_spec_metrics": ("study_spec", "metrics"),
    "study_spec_parameters": ("study_spec", "parameters"),
    "study_spec_algorithm": ("study_spec", "algorithm"),
    "study_spec_measurement_selection_type": ("study_spec", "measurement_selection_type"),
    "max_trial_count": ("max_trial_count",),
    "parallel_trial_count": ("parallel_trial_count",),
    "max_failed_trial_count": ("max_failed_trial_count",),
    "encryption_spec_key_name": ("encryption_spec", "kms_key_name"),
}
_LAUNCHERS: Mapping[str, tuple[JobKind, _Fields]] = {
    "google_cloud_pipeline_components.container.v1.custom_job.launcher": ("CustomJob", _CUSTOM_JOB),
    "google_cloud_pipeline_components.container.preview.custom_job.launcher": ("CustomJob", _CUSTOM_JOB),
    "google_cloud_pipeline_components.container.v1.hyperparameter_tuning_job.launcher": (
        "HyperparameterTuningJob",
        _TUNING_JOB,
    ),
}
_TEXTS = {
    "display_name",
    "service_account",
    "tensorboard",
    "network",
    "base_output_directory",
    "encryption_spec_key_name",
}
_POOLS = "worker_pool_specs"
"""The input without which there is nothing to judge."""
_LISTS = (_POOLS, "study_spec_metrics", "study_spec_parameters")

_ONE_PLACEHOLDER = re.compile(r"\{\{(?:(?!\}\}).)*\}\}")
_LOCATION_OF_PIPELINE = "{{$.pipeline_google_cloud_location}}"
_MOST_TASKS = 10_000
"""That are looked at, every call of a sub-pipeline counted: far more than people write, so that no document takes for ever."""
_DEEPEST = 50
"""Sub-pipelines within sub-pipelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineJobTask:
    """A training job of a pipeline."""

    task: str
    """Path of the task: `root.dag.tasks[train]`."""
    kind: JobKind
    document: Mapping[str, Any] | None
    """The job that it makes, in snake_case; None when its pools are made while the pipeline runs."""
    places: Mapping[str, str]
    """By field of the job (`job_spec.network`) that the task can set, where in the pipeline its value stands."""
    is_op: bool = True
    """Whether inputs of the op make the job; False for components that hold it in their own text."""
    unknown: frozenset[str] = frozenset()
    """Fields of the job that are decided while the pipeline runs."""
    location: str | None = None
    """Region of the job: "" when it is decided while the pipeline runs, None when it is that of the pipeline."""
    findings: tuple[Finding, ...] = field(default=())
    """About the task rather than the job."""

    def path_of(self, path: str) -> str:
        """Where in the pipeline a field of the job stands: as the input that carries it, or else below the task."""
        return self._place_of(path) or f"{self.task}.{path}"

    def carries(self, path: str) -> bool:
        """Whether the task can set this field of the job, or any below it."""
        return self._place_of(path) is not None

    def _place_of(self, path: str) -> str | None:
        for name, place in self.places.items():
            if is_within(path, name):
                return f"{place}{path[len(name) :]}" if name else f"{place}.{path}"
        below = [place for name, place in self.places.items() if is_within(name, path)]
        if len(below) > 1:
            return self.task
        return below[0] if below else None


def training_jobs(document: Mapping[str, Any]) -> Iterator[PipelineJobTask]:
    """The training jobs of a compiled pipeline, or of a PipelineJob that holds one, in the order of its tasks.

    A sub-pipeline that is called twice holds its jobs twice, with the constants of either call. Raises nothing, whatever
    the document holds.
    """
    spec = spec_of(document)
    runtime = _mapping(document.get("runtimeConfig") or document.get("runtime_config"))
    values = _mapping(runtime.get("parameterValues") or runtime.get("parameter_values"))
    given = {
        name: _Input(value=value, place=f"runtimeConfig.parameterValues.{name}")
        for name, value in _named(values)
    }
    tasks = _tasks(spec, "root", _mapping(spec.get("root")), given, ())
    for task in itertools.islice(tasks, _MOST_TASKS):
        container = _container(spec, task.component)
        words = [*_list(container.get("command")), *_list(container.get("args"))]
        kind, fields = next(
            (found for module, found in _LAUNCHERS.items() if module in words), (None, _CUSTOM_JOB)
        )
        if kind is None:
            continue
        if _POOLS in task.inputs:
            yield _job_of_inputs(task, kind, fields)
        else:
            yield _job_of_payload(task, kind, words)


def spec_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pipeline that a document is or holds; empty when what it holds is none."""
    return _mapping(
        next((document[name] for name in ("pipelineSpec", "pipeline_spec") if name in document), document)
    )


def is_within(path: str, holder: str) -> bool:
    """Whether a path is `holder` or below it; every path is below the empty one."""
    return not holder or path == holder or path.startswith((f"{holder}.", f"{holder}["))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Input:
    """What a task is given."""

    value: Any = None
    place: str = ""
    """Where the value stands; empty for what is decided while the pipeline runs."""

    @property
    def is_known(self) -> bool:
        return bool(self.place)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    place: str
    task: Mapping[str, Any]
    component: Mapping[str, Any]
    inputs: Mapping[str, _Input]


def _tasks(
    spec: Mapping[str, Any],
    place: str,
    dag: Mapping[str, Any],
    given: Mapping[str, _Input],
    callers: tuple[str, ...],
) -> Iterator[_Task]:
    """The tasks of a pipeline and, behind each that calls a sub-pipeline, those of that one."""
    components = _mapping(spec.get("components"))
    for name, held in _named(_mapping(dag.get("dag")).get("tasks")):
        task = _mapping(held)
        called = _text(_mapping(task.get("componentRef")).get("name"))
        at = f"{place}.dag.tasks[{name}]"
        component = _mapping(components.get(called))
        inputs = _inputs(at, task, component, given)
        yield _Task(place=at, task=task, component=component, inputs=inputs)
        if called not in callers and len(callers) < _DEEPEST:
            yield from _tasks(spec, f"components[{called}]", component, inputs, (*callers, called))


def _inputs(
    place: str, task: Mapping[str, Any], component: Mapping[str, Any], outer: Mapping[str, _Input]
) -> dict[str, _Input]:
    declared = _mapping(_mapping(component.get("inputDefinitions")).get("parameters"))
    given = _mapping(_mapping(task.get("inputs")).get("parameters"))
    inputs = {
        name: _input(f"{place}.{name}", _mapping(given.get(name)), _mapping(declared.get(name)), outer)
        for name, _ in (*_named(declared), *_named(given))
    }
    item = _text(_mapping(task.get("parameterIterator")).get("itemInput"))
    return inputs | {item: _Input()} if item else inputs


def _input(
    place: str, given: Mapping[str, Any], declared: Mapping[str, Any], outer: Mapping[str, _Input]
) -> _Input:
    if not given:
        default = declared.get("defaultValue")
        return _Input(value=None if isinstance(default, str) and "{{$" in default else default, place=place)
    runtime = _mapping(given.get("runtimeValue"))
    if "constant" in runtime:
        return _Input(value=runtime["constant"], place=place)
    if "componentInputParameter" in given and not given.get("parameterExpressionSelector"):
        return outer.get(_text(given["componentInputParameter"]), _Input())
    return _Input()


def _container(spec: Mapping[str, Any], component: Mapping[str, Any]) -> Mapping[str, Any]:
    executors = _mapping(_mapping(spec.get("deploymentSpec")).get("executors"))
    return _mapping(_mapping(executors.get(_text(component.get("executorLabel")))).get("container"))


def _job_of_inputs(task: _Task, kind: JobKind, fields: _Fields) -> PipelineJobTask:
    document: dict[str, Any] = {}
    places: dict[str, str] = {}
    unknown: set[str] = set()
    findings = list(_about_task(task))
    for name, path in fields.items():
        if name not in task.inputs:
            continue
        given = _settled(name, task.inputs[name])
        dotted = ".".join(path)
        places[dotted] = given.place or f"{task.place}.{name}"
        if not given.is_known:
            unknown.add(dotted)
            findings += [_made_at_run_time(places[dotted])] if name in _LISTS else []
        if name in _LISTS and given.is_known:
            _set(document, path, _list_of(given.value))
        elif given.value not in (None, "", [], {}):
            _set(document, path, given.value)
    if unknown.intersection(("study_spec.metrics", "study_spec.parameters")):
        unknown.add("study_spec")  # which then may seem to be missing
    return PipelineJobTask(
        task=task.place,
        kind=kind,
        document=document
        if task.inputs[_POOLS].is_known and ".".join(fields[_POOLS]) not in unknown
        else None,
        places=places,
        unknown=frozenset(unknown | _held_by(unknown, places)),
        location=_location(task.inputs.get("location", _Input(place=task.place))),
        findings=tuple(findings),
    )


def _settled(name: str, given: _Input) -> _Input:
    """An input as the job takes it. Of what is decided while the pipeline runs a text keeps a placeholder, the rest is None."""
    value = given.value
    if not given.is_known:
        return _Input(value="{{$.inputs.parameters['" + name + "']}}" if name in _TEXTS else None)
    if not isinstance(value, str) or not PLACEHOLDER.search(value):
        return given
    if name in _TEXTS:
        return _Input(value=value, place="" if _ONE_PLACEHOLDER.fullmatch(value) else given.place)
    return _Input()


def _held_by(unknown: set[str], carried: Mapping[str, str]) -> set[str]:
    """The messages of the job of which nothing that the task sets is known."""
    holders = {path.rpartition(".")[0] for path in unknown} - {"", "job_spec", "trial_job_spec"}
    return {
        holder for holder in holders if all(path in unknown for path in carried if is_within(path, holder))
    }


def _location(given: _Input) -> str | None:
    if not given.is_known:
        return ""
    if given.value in (None, "", _LOCATION_OF_PIPELINE) or not isinstance(given.value, str):
        return None
    return "" if PLACEHOLDER.search(given.value) else given.value


def _job_of_payload(task: _Task, kind: JobKind, words: list[Any]) -> PipelineJobTask:
    """Of a component that holds its job in its own arguments, as AutoML's do; where these are made while the pipeline runs,
    nothing is said: they are nobody's who could mend them."""
    unknown: set[str] = set()
    payload = _parsed(_argument(words, "--payload"))
    is_job = isinstance(payload, Mapping) and not _is_spliced(payload)
    try:
        document = _without_splices(payload, "", unknown) if is_job else None
    except RecursionError:
        document = None
    location = task.inputs.get("location") or _Input(value=_argument(words, "--location"), place=task.place)
    return PipelineJobTask(
        task=task.place,
        kind=kind,
        document=document,
        places={"": f"{task.place}.payload"},
        is_op=False,
        unknown=frozenset(unknown),
        location=_location(location),
        findings=tuple(_about_task(task)) if document is not None else (),
    )


def _argument(words: list[Any], option: str) -> Any:
    index = words.index(option) + 1 if option in words else len(words)
    return words[index] if index < len(words) else None


def _without_splices(value: Any, path: str, unknown: set[str]) -> Any:
    """The same with a placeholder for what kfp splices in; where that is goes into `unknown`."""
    if isinstance(value, list):
        return [_without_splices(each, f"{path}[{index}]", unknown) for index, each in enumerate(value)]
    if isinstance(value, Mapping) and not _is_spliced(value):
        return {
            name: _without_splices(each, f"{path}.{name}".lstrip("."), unknown)
            for name, each in value.items()
        }
    if isinstance(value, Mapping) or (isinstance(value, str) and PLACEHOLDER.search(value)):
        unknown.add(path)
        return "{{$}}" if isinstance(value, Mapping) else value
    return value


def _is_spliced(value: Mapping[Any, Any]) -> bool:
    return set(value) in ({"Concat"}, {"IfPresent"})


def _made_at_run_time(place: str) -> Finding:
    return Finding(
        path=place,
        rule="made-at-run-time",
        reason="it is made while the pipeline runs; the job cannot be checked here.",
        fix="Decide it when the pipeline is compiled.",
        severity="warning",
    )


def _list_of(value: Any) -> Any:
    """GCPC declares the lists of its tuning op as lists of JSON texts, and takes mappings too."""
    value = [] if value is None else _parsed(value)
    return [_parsed(each) for each in value] if isinstance(value, list) else value


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _about_task(task: _Task) -> Iterator[Finding]:
    if _mapping(task.task.get("cachingOptions")).get("enableCache"):
        yield Finding(
            path=f"{task.place}.cachingOptions",
            rule="training-is-cached",
            reason="the task is cached: with equal inputs training is skipped, also when what lies behind a URI has changed.",
            fix="Call .set_caching_options(False) on the task.",
            severity="warning",
        )


def _set(document: dict[str, Any], fields: tuple[str, ...], value: Any) -> None:
    for name in fields[:-1]:
        document = document.setdefault(name, {})
    document[fields[-1]] = value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _named(value: Any) -> list[tuple[str, Any]]:
    """Of a mapping, as far as its keys are names."""
    return [(name, held) for name, held in _mapping(value).items() if isinstance(name, str)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
