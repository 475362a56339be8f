"""Finds the training jobs in a compiled pipeline (kfp's intermediate representation, schema 2.1).

A task whose container is GCPC's launcher of a CustomJob or of a HyperparameterTuningJob is one; its inputs, as far as they
are constants, make the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_components.jobs.findings import Finding

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
_LISTS = ("worker_pool_specs", "study_spec_metrics", "study_spec_parameters")
"""Inputs without which there is nothing to judge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineJobTask:
    """A training job of a pipeline."""

    task: str
    """Path of the task: `root.dag.tasks[train]`."""
    kind: JobKind
    document: Mapping[str, Any] | None
    """The job that it makes, in snake_case; None when its pools are made while the pipeline runs."""
    findings: tuple[Finding, ...] = field(default=())
    """About the task rather than the job."""

    def path_of(self, path: str) -> str:
        """Where in the pipeline a field of the job stands: as the input of the op that carries it."""
        for name, fields in next(fields for kind, fields in _LAUNCHERS.values() if kind == self.kind).items():
            dotted = ".".join(fields)
            if path == dotted or path.startswith((f"{dotted}.", f"{dotted}[")):
                return f"{self.task}.{name}{path[len(dotted) :]}"
        return f"{self.task}.{path}"


def training_jobs(document: Mapping[str, Any]) -> Iterator[PipelineJobTask]:
    """The training jobs of a compiled pipeline, or of a PipelineJob that holds one, in the order of the file."""
    spec = document.get("pipelineSpec") or document.get("pipeline_spec") or document
    components = _mapping(spec.get("components"))
    launchers = {
        name: found
        for name, component in components.items()
        if (found := _launcher(spec, _mapping(component).get("executorLabel")))
    }
    dags = {
        "root": _mapping(spec.get("root")),
        **{f"components[{name}]": _mapping(each) for name, each in components.items()},
    }
    for place, component in dags.items():
        for name, task in _mapping(_mapping(component.get("dag")).get("tasks")).items():
            reference = _mapping(_mapping(task).get("componentRef")).get("name")
            if reference in launchers:
                at = f"{place}.dag.tasks[{name}]"
                yield _job(at, _mapping(task), _mapping(components[reference]), *launchers[reference])


def _launcher(spec: Mapping[str, Any], label: Any) -> tuple[JobKind, _Fields] | None:
    executors = _mapping(_mapping(spec.get("deploymentSpec")).get("executors"))
    container = _mapping(_mapping(executors.get(label)).get("container"))
    words = [*container.get("command", ()), *container.get("args", ())]
    return next((found for module, found in _LAUNCHERS.items() if module in words), None)


def _job(
    place: str, task: Mapping[str, Any], component: Mapping[str, Any], kind: JobKind, fields: _Fields
) -> PipelineJobTask:
    document: dict[str, Any] = {}
    declared = _mapping(_mapping(component.get("inputDefinitions")).get("parameters"))
    given = _mapping(_mapping(task.get("inputs")).get("parameters"))
    findings = list(_about_task(place, task))
    is_known = True
    for name, path in fields.items():
        value = _value(name, _mapping(given.get(name)), _mapping(declared.get(name)))
        if name in _LISTS and isinstance(value, str):
            findings.append(_made_at_run_time(place, name))
            is_known = False
        elif value not in (None, "", [], {}):
            _set(document, path, [_parsed(each) for each in value] if name in _LISTS else value)
    return PipelineJobTask(
        task=place, kind=kind, document=document if is_known else None, findings=tuple(findings)
    )


def _made_at_run_time(place: str, name: str) -> Finding:
    return Finding(
        path=f"{place}.{name}",
        rule="made-at-run-time",
        reason="it is made while the pipeline runs; the job cannot be checked here.",
        fix="Decide it when the pipeline is compiled.",
        severity="warning",
    )


def _parsed(value: Any) -> Any:
    """GCPC declares the lists of its tuning op as lists of JSON texts, and takes mappings too."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _about_task(place: str, task: Mapping[str, Any]) -> Iterator[Finding]:
    if _mapping(task.get("cachingOptions")).get("enableCache"):
        yield Finding(
            path=f"{place}.cachingOptions",
            rule="training-is-cached",
            reason="the task is cached: with equal inputs training is skipped, also when what lies behind a URI has changed.",
            fix="Call .set_caching_options(False) on the task.",
            severity="warning",
        )


def _value(name: str, given: Mapping[str, Any], declared: Mapping[str, Any]) -> Any:
    """The constant of an input; a placeholder where it is known only when the pipeline runs."""
    runtime = _mapping(given.get("runtimeValue"))
    if "constant" in runtime:
        return runtime["constant"]
    if given:
        return (
            "{{$.inputs.parameters['" + name + "']}}"
            if name in _TEXTS or name == "worker_pool_specs"
            else None
        )
    default = declared.get("defaultValue")
    return None if isinstance(default, str) and default.startswith("{{$") else default


def _set(document: dict[str, Any], fields: tuple[str, ...], value: Any) -> None:
    for name in fields[:-1]:
        document = document.setdefault(name, {})
    document[fields[-1]] = value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
