"""Finds the training jobs in a compiled pipeline (kfp's intermediate representation, schema 2.1).

A task whose container is GCPC's launcher of a CustomJob is one; its inputs, as far as they are constants, make the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_components.jobs.findings import Finding

_LAUNCHER = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
_FIELDS = {
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
"""Of a CustomJob, by input of CustomTrainingJobOp."""
_TEXTS = {
    "display_name",
    "service_account",
    "tensorboard",
    "network",
    "base_output_directory",
    "encryption_spec_key_name",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineJobTask:
    """A training job of a pipeline."""

    task: str
    """Path of the task: `root.dag.tasks[train]`."""
    document: Mapping[str, Any] | None
    """The CustomJob that it makes, in snake_case; None when its pools are made while the pipeline runs."""
    findings: tuple[Finding, ...] = field(default=())
    """About the task rather than the job."""

    def path_of(self, path: str) -> str:
        """Where in the pipeline a field of the job stands: as the input of CustomTrainingJobOp that carries it."""
        for name, fields in _FIELDS.items():
            dotted = ".".join(fields)
            if path == dotted or path.startswith((f"{dotted}.", f"{dotted}[")):
                return f"{self.task}.{name}{path[len(dotted) :]}"
        return f"{self.task}.{path}"


def training_jobs(document: Mapping[str, Any]) -> Iterator[PipelineJobTask]:
    """The training jobs of a compiled pipeline, or of a PipelineJob that holds one, in the order of the file."""
    spec = document.get("pipelineSpec") or document.get("pipeline_spec") or document
    components = _mapping(spec.get("components"))
    launchers = {
        name
        for name, component in components.items()
        if _is_launcher(spec, _mapping(component).get("executorLabel"))
    }
    dags = {
        "root": _mapping(spec.get("root")),
        **{f"components[{name}]": _mapping(each) for name, each in components.items()},
    }
    for place, component in dags.items():
        for name, task in _mapping(_mapping(component.get("dag")).get("tasks")).items():
            reference = _mapping(_mapping(task).get("componentRef")).get("name")
            if reference in launchers:
                yield _job(f"{place}.dag.tasks[{name}]", _mapping(task), _mapping(components[reference]))


def _is_launcher(spec: Mapping[str, Any], label: Any) -> bool:
    executors = _mapping(_mapping(spec.get("deploymentSpec")).get("executors"))
    container = _mapping(_mapping(executors.get(label)).get("container"))
    return _LAUNCHER in [*container.get("command", ()), *container.get("args", ())]


def _job(place: str, task: Mapping[str, Any], component: Mapping[str, Any]) -> PipelineJobTask:
    document: dict[str, Any] = {}
    declared = _mapping(_mapping(component.get("inputDefinitions")).get("parameters"))
    given = _mapping(_mapping(task.get("inputs")).get("parameters"))
    for name, fields in _FIELDS.items():
        value = _value(name, _mapping(given.get(name)), _mapping(declared.get(name)))
        if value not in (None, "", [], {}):
            _set(document, fields, value)
    findings = tuple(_about_task(place, task))
    if isinstance(_mapping(document.get("job_spec")).get("worker_pool_specs"), str):
        made = Finding(
            path=f"{place}.worker_pool_specs",
            rule="made-at-run-time",
            reason="the worker pools are made while the pipeline runs; they cannot be checked here.",
            fix="Decide them when the pipeline is compiled.",
            severity="warning",
        )
        return PipelineJobTask(task=place, document=None, findings=(*findings, made))
    return PipelineJobTask(task=place, document=document, findings=findings)


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
