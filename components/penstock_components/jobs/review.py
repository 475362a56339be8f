"""What changed between two job specs or compiled pipelines, told as a change review: `machines 2 -> 4 x a3-highgpu-8g`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_components.jobs.check import kind_of_document
from penstock_components.jobs.findings import Case, in_case
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJob,
    CustomJobSpec,
    MachineSpec,
    PythonPackageSpec,
)
from penstock_components.jobs.pipeline_ir import training_jobs
from penstock_components.jobs.reader import read
from penstock_components.jobs.roles import ROLE_NAMES
from penstock_components.jobs.rules.secrets import hides
from penstock_components.jobs.wire import case_of, to_api

_STRATEGIES = {"": "standard", "STANDARD": "standard", "SPOT": "Spot", "FLEX_START": "Flex-start"}
_CONFIG = "--config="
_DEFAULTS = {"timeout": "604800s", "max_wait_duration": "86400s"}
"""Of scheduling: what the service takes where nothing is said."""
_DEFAULT_DISKS = (
    {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 100}, {"boot_disk_type": "pd-ssd"}, {"boot_disk_size_gb": 100},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What turns machines into hours: measured or given, the planner knows no rates of its own."""

    epoch_tokens: float
    tokens_per_second: float
    """Of one accelerator, or of one machine without."""

    def hours(self, spec: CustomJobSpec) -> float:
        """Of one epoch on the primary and the workers of a job."""
        ranks = sum(
            pool.replica_count * max(1, pool.machine_spec.accelerator_count if pool.machine_spec else 0)
            for pool in spec.worker_pool_specs[:2]
        )
        return self.epoch_tokens / (self.tokens_per_second * max(1, ranks)) / 3600


class ReviewError(ValueError):
    """Two documents that are not of one kind."""


def normalised(document: Any, parent: str = "") -> Any:
    """A document without what says nothing about a run: descriptions and the version of the SDK that wrote it."""
    if isinstance(document, Mapping):
        is_labels = parent == "labels" and all(isinstance(value, str) for value in document.values())
        left_out = set() if is_labels else {"description", "sdkVersion", "sdk_version"}
        return {
            name: normalised(value, name)
            for name, value in document.items()
            if name not in left_out or not isinstance(value, str)
        }
    return [normalised(each) for each in document] if isinstance(document, list) else document


def review(old: Any, new: Any, *, rate: Rate | None = None) -> list[str]:
    """A line for each difference that a reviewer cares about; empty when both make the same run.

    Both are documents as `check.check_document` takes them. What has no words of its own is told by its path. Values that
    look like secrets are not told. Raises ReviewError for documents of different kinds.
    """
    kind = _common_kind(old, new)
    old, new = normalised(old), normalised(new)
    case: Case = "snake" if kind == "pipeline" else case_of(new)
    lines: list[str] = []
    before, after = dict(_jobs(old)), dict(_jobs(new))
    for name in [*before, *(name for name in after if name not in before)]:
        said = list(_job(before.get(name), after.get(name), rate, case))
        lines += said if len(before) <= 1 and len(after) <= 1 else [f"{name}: {line}" for line in said]
    lines += _leaves(_study(old), _study(new), case)
    if kind == "pipeline":
        lines += _leaves(_without_jobs(old), _without_jobs(new), case)
    return lines


def _common_kind(old: Any, new: Any) -> str:
    """Of both; a CustomJob and the spec of one are the same kind."""
    of_old, of_new = kind_of_document(old), kind_of_document(new)
    if of_old.removesuffix("Spec") != of_new.removesuffix("Spec"):
        raise ReviewError(
            f"the old document is {of_old or 'no job'} and the new one {of_new or 'no job'}; compare two of one kind."
        )
    return of_new


def _jobs(document: Any) -> Iterator[tuple[str, CustomJob]]:
    """By task, or by nothing outside a pipeline; of a tuning job that of its trials."""
    kind = kind_of_document(document)
    if kind == "pipeline":
        calls: Counter[str] = Counter()
        for job in training_jobs(document):
            calls[job.task] += 1  # a sub-pipeline that is called twice has its tasks twice
            name = job.task if calls[job.task] == 1 else f"{job.task} (call {calls[job.task]})"
            if job.document is not None:
                yield name, _custom_job(job.kind, job.document, "snake")
    elif kind:
        yield "", _custom_job(kind, document, case_of(document))


def _custom_job(kind: str, document: Any, case: Case) -> CustomJob:
    if kind == "CustomJob":
        return read(CustomJob, document, case=case).message
    if kind == "CustomJobSpec":
        return CustomJob(job_spec=read(CustomJobSpec, document, case=case).message)
    from penstock_components.jobs.study import HyperparameterTuningJob

    tuning = read(HyperparameterTuningJob, document, case=case).message
    return CustomJob(
        display_name=tuning.display_name,
        job_spec=tuning.trial_job_spec,
        labels=tuning.labels,
        encryption_spec=tuning.encryption_spec,
    )


def _study(document: Any) -> dict[str, Any]:
    """What a tuning job searches; nothing of another document."""
    if kind_of_document(document) != "HyperparameterTuningJob":
        return {}
    from penstock_components.jobs.study import HyperparameterTuningJob

    told = to_api(read(HyperparameterTuningJob, document, case=case_of(document)).message)
    trials = {"display_name", "trial_job_spec", "labels", "encryption_spec"}
    return {name: value for name, value in told.items() if name not in trials}


def _job(old: CustomJob | None, new: CustomJob | None, rate: Rate | None, case: Case) -> Iterator[str]:
    if old is None or new is None:
        yield f"{'new' if old is None else 'removed'} training job: {_summary(new or old)}"
        return
    before, after = old.job_spec or CustomJobSpec(), new.job_spec or CustomJobSpec()
    yield from _machines(before, after)
    yield from _scheduling(before, after)
    for index in range(max(len(before.worker_pool_specs), len(after.worker_pool_specs))):
        if (
            index != 1
            or _program(before, 1) != _program(before, 0)
            or _program(after, 1) != _program(after, 0)
        ):
            yield from _programs(
                _program(before, index), _program(after, index), ROLE_NAMES[min(index, 3)] if index else ""
            )
    yield from _one("service account", before.service_account, after.service_account)
    yield from _leaves(_rest(old), _rest(new), case)
    if rate is not None and rate.hours(before) != rate.hours(after):
        yield f"hours per epoch {rate.hours(before):.3g} -> {rate.hours(after):.3g}"


def _machines(old: CustomJobSpec, new: CustomJobSpec) -> Iterator[str]:
    """Primary and workers are one line where they have one machine; each other pool has its own."""
    yield from _counts("machines", _training(old), _training(new))
    for index in range(2, max(len(old.worker_pool_specs), len(new.worker_pool_specs))):
        yield from _counts(ROLE_NAMES[min(index, 3)], _pool(old, index), _pool(new, index))


def _training(spec: CustomJobSpec) -> tuple[int, str]:
    primary, workers = _pool(spec, 0), _pool(spec, 1)
    if not workers[0] or workers[1] == primary[1]:
        return primary[0] + workers[0], primary[1]
    return primary[0] + workers[0], f"{primary[1]} and {workers[1]}"


def _pool(spec: CustomJobSpec, index: int) -> tuple[int, str]:
    if index >= len(spec.worker_pool_specs):
        return 0, ""
    pool = spec.worker_pool_specs[index]
    return pool.replica_count, _machine(pool.machine_spec or MachineSpec())


def _machine(machine: MachineSpec) -> str:
    accelerators = (
        f" with {machine.accelerator_count} x {machine.accelerator_type}" if machine.accelerator_count else ""
    )
    topology = f" {machine.tpu_topology}" if machine.tpu_topology else ""
    partition = f" in parts of {machine.gpu_partition_size}" if machine.gpu_partition_size else ""
    return f"{machine.machine_type}{topology}{accelerators}{partition}"


def _counts(name: str, old: tuple[int, str], new: tuple[int, str]) -> Iterator[str]:
    if old == new:
        return
    if not old[0] or not new[0]:
        yield f"{'new' if not old[0] else 'removed'} {name}: {(new if new[0] else old)[0]} x {(new if new[0] else old)[1]}"
    elif old[1] == new[1]:
        yield f"{name} {old[0]} -> {new[0]} x {old[1].partition(' with ')[0]}"
    else:
        yield f"{name} {old[0]} x {old[1]} -> {new[0]} x {new[1]}"


def _scheduling(old: CustomJobSpec, new: CustomJobSpec) -> Iterator[str]:
    before = _STRATEGIES.get(old.scheduling.strategy if old.scheduling else "", "other")
    after = _STRATEGIES.get(new.scheduling.strategy if new.scheduling else "", "other")
    if before != after:
        yield f"{before} -> {after}"


def _program(spec: CustomJobSpec, index: int) -> ContainerSpec | PythonPackageSpec | None:
    if index >= len(spec.worker_pool_specs):
        return None
    return spec.worker_pool_specs[index].container_spec or spec.worker_pool_specs[index].python_package_spec


def _programs(
    old: ContainerSpec | PythonPackageSpec | None, new: ContainerSpec | PythonPackageSpec | None, of: str
) -> Iterator[str]:
    if old is None or new is None:
        return  # told with the machines
    prefix = f"{of}: " if of else ""
    yield from (f"{prefix}{line}" for line in _images(_image(old), _image(new)))
    before, after = _arguments(old), _arguments(new)
    for name in [*before, *(name for name in after if name not in before)]:
        yield from (f"{prefix}{line}" for line in _one(name, before.get(name), after.get(name)))


def _image(program: ContainerSpec | PythonPackageSpec) -> str:
    return program.image_uri if isinstance(program, ContainerSpec) else program.executor_image_uri


def _images(old: str, new: str) -> Iterator[str]:
    if old == new:
        return
    (name, _, digest), (new_name, _, new_digest) = old.partition("@"), new.partition("@")
    if name == new_name and digest and new_digest:
        yield f"image digest changed: {name} {digest[:19]} -> {new_digest[:19]}"
    else:
        yield f"image {old} -> {new}"


def _arguments(program: ContainerSpec | PythonPackageSpec) -> dict[str, Any]:
    """Everything that starts the program, by what a person calls it; our trainer's config by its dotted fields."""
    told: dict[str, Any] = {}
    if isinstance(program, ContainerSpec):
        told["command"] = " ".join(program.command)
    else:
        told |= {"module": program.python_module, "packages": " ".join(program.package_uris)}
    words = []
    for word in program.args:
        name, separator, value = word.partition("=")
        if word.startswith(_CONFIG):
            told |= _flat(_json(value))
        elif separator and name.startswith("-"):
            told[name] = value
        else:
            words.append(word)
    told["arguments"] = " ".join(words)
    return told | {f"env {variable.name}": variable.value for variable in program.env}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {
            key: leaf
            for name, held in value.items()
            for key, leaf in _flat(held, f"{path}.{name}".lstrip(".")).items()
        }
    if isinstance(value, list) and any(isinstance(each, (Mapping, list)) for each in value):
        return {
            key: leaf
            for index, held in enumerate(value)
            for key, leaf in _flat(held, f"{path}[{index}]").items()
        }
    return {path: value}


def _one(name: str, old: Any, new: Any) -> Iterator[str]:
    if old == new or (not old and not new):
        return
    if any(hides(name.removeprefix("env "), str(value)) for value in (old, new) if value):
        change = "is new" if old in (None, "") else "is removed" if new in (None, "") else "changed"
        yield f"{name} {change} (looks like a secret: not shown)"
    elif old in (None, ""):
        yield f"new {name} {new}"
    elif new in (None, ""):
        yield f"{name} {old} removed"
    else:
        yield f"{name} {old} -> {new}"


def _leaves(old: Any, new: Any, case: Case) -> list[str]:
    before, after = _flat(old), _flat(new)
    names = [*before, *(name for name in after if name not in before)]
    return [
        line
        for name in names
        if name
        for line in _one(in_case(name, case), before.get(name), after.get(name))
    ]


def _rest(job: CustomJob) -> dict[str, Any]:
    """What of a job has no words of its own."""
    told = to_api(job)
    spec = told.get("job_spec", {})
    for name, default in _DEFAULTS.items():
        if spec.get("scheduling", {}).get(name) == default:
            del spec["scheduling"][name]
    spec.pop("service_account", None)
    spec.get("scheduling", {}).pop("strategy", None)
    for pool in spec.get("worker_pool_specs", ()):
        for name in ("replica_count", "container_spec", "python_package_spec"):
            pool.pop(name, None)
        if pool.get("disk_spec") in _DEFAULT_DISKS:
            del pool["disk_spec"]
        for name in (
            "machine_type",
            "accelerator_type",
            "accelerator_count",
            "tpu_topology",
            "gpu_partition_size",
        ):
            pool.get("machine_spec", {}).pop(name, None)
    return told


def _without_jobs(document: Any) -> Any:
    """A pipeline without the inputs of its training tasks, which have been told."""
    if not isinstance(document, Mapping):
        return document
    tasks = {job.task for job in training_jobs(document)}

    def strip(value: Any, path: str) -> Any:
        if path in tasks and isinstance(value, Mapping):
            return {name: held for name, held in value.items() if name != "inputs"}
        if isinstance(value, Mapping):
            inside = path.endswith((".tasks", "components")) or path == "components"
            return {
                name: strip(held, f"{path}[{name}]" if inside else f"{path}.{name}".lstrip("."))
                for name, held in value.items()
            }
        return value

    return strip(document.get("pipelineSpec") or document, "")


def _summary(job: CustomJob | None) -> str:
    spec = (job.job_spec if job else None) or CustomJobSpec()
    count, machine = _training(spec)
    return f"{count} x {machine}"
