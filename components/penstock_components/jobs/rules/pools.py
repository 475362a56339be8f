"""Which pools a job has, how many replicas, and what runs in them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJobSpec,
    EnvVar,
    PythonPackageSpec,
    WorkerPoolSpec,
)
from penstock_components.jobs.roles import PRIMARY, ROLE_NAMES
from penstock_components.jobs.rules.contents import Program, filled_pools, is_placeholder, programs
from penstock_components.jobs.rules.context import Context
from penstock_components.machines.catalogue import kind_of

MAX_ENV = 100
"""Variables of one pool."""
MAX_PACKAGES = 100
_PREBUILT = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai/training/|(?:(?:us|eu|asia)\.)?gcr\.io/cloud-aiplatform/training/"
)
"""Where Google keeps its images for Python packages."""
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")
_VARIABLE = re.compile(r"(?<![$\\])\$(?:[A-Z_][A-Z0-9_]*\b|\{[A-Z_][A-Z0-9_]*\})")
"""As a shell would expand it. `$(NAME)` is another thing: Kubernetes expands that itself."""


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Number and order of pools, replicas, programs, environment and command lines."""
    pools = spec.worker_pool_specs
    if not 1 <= len(pools) <= len(ROLE_NAMES):
        yield _pool_count(len(pools))
    if pools and pools[PRIMARY] == WorkerPoolSpec():
        yield Finding(
            path=f"worker_pool_specs[{PRIMARY}]",
            rule="primary-missing",
            reason="pool 0 is empty, and it is the primary; only the pools behind it may be empty.",
            fix="Put the primary into pool 0, with replica_count 1.",
        )
    elif context.through_gcpc:
        yield from dropped_pools(spec)
    for index, path, pool in filled_pools(spec):
        yield from _replicas(index, path, pool)
        yield from _task(path, pool)
    for program in programs(spec):
        yield from _env(program.env, f"{program.path}.env")
        yield from _command_line(program)


def _pool_count(count: int) -> Finding:
    told = ", ".join(f"{index} {role}" for index, role in enumerate(ROLE_NAMES))
    return Finding(
        path="worker_pool_specs",
        rule="pool-count",
        reason=f"there are {count} pools; a job has 1 to {len(ROLE_NAMES)}, by their place: {told}."
        if count
        else "there is no worker pool.",
        fix="Put replicas of one role into one pool and raise its replica_count."
        if count
        else "Give pool 0, the primary, with replica_count 1.",
    )


def dropped_pools(spec: CustomJobSpec) -> Iterator[Finding]:
    """Empty pools with others behind them, all as one fault; at the end an empty pool says nothing, kept or dropped."""
    pools = spec.worker_pool_specs
    filled = [index for index, _, _ in filled_pools(spec)]
    moved = next(((place, index) for place, index in enumerate(filled) if place != index), None)
    if moved is None:
        return
    place, index = moved
    empty = [str(each) for each in range(len(pools)) if each not in filled and each < filled[-1]]
    role = ROLE_NAMES[place] if place < len(ROLE_NAMES) else "no role"
    yield Finding(
        path=f"worker_pool_specs[{empty[0]}]",
        rule="empty-pool-through-gcpc",
        reason="the pool is empty; CustomTrainingJobOp drops empty pools before it sends the job, so that the pools behind it "
        f"move up: pool {index} would become pool {place} ({role}).",
        fix=f"Give pool {' and pool '.join(empty)} at least one replica, or send the job with the SDK, gcloud or REST.",
    )


def _replicas(index: int, path: str, pool: WorkerPoolSpec) -> Iterator[Finding]:
    count = pool.replica_count
    if kind_of(pool.machine_spec.machine_type if pool.machine_spec else "") == "tpu":
        return  # one replica too, for another reason, which the rules of machines tell
    if index == PRIMARY and count != 1:
        others = (
            f"Set replica_count to 1 and put the other {count - 1} into pool 1, with the same machine_spec and program; "
            "parameter servers are pool 2."
        )
        yield Finding(
            path=f"{path}.replica_count",
            rule="primary-replicas",
            reason=f"pool 0 has {count} replicas; it is the primary and has exactly one.",
            fix=others if count > 1 else "Set replica_count to 1.",
        )
    elif count < 1:
        yield Finding(
            path=f"{path}.replica_count",
            rule="replica-count",
            reason=f"the pool has {count} replicas, but is not empty otherwise.",
            fix="Set replica_count to 1 or more, or leave the pool out.",
        )


def _task(path: str, pool: WorkerPoolSpec) -> Iterator[Finding]:
    container, package = pool.container_spec, pool.python_package_spec
    if container is not None and package is not None:
        yield Finding(
            path=path,
            rule="one-of",
            reason="container_spec and python_package_spec exclude each other.",
            fix="Keep one.",
        )
    elif container is None and package is None:
        yield Finding(
            path=f"{path}.container_spec",
            rule="task-missing",
            reason="the pool runs nothing: it has neither container_spec nor python_package_spec.",
            fix="Give container_spec.image_uri, or python_package_spec with executor_image_uri, package_uris and python_module.",
        )
    elif container is not None:
        yield from _container(f"{path}.container_spec", container)
    elif package is not None:
        yield from _package(f"{path}.python_package_spec", package)


def _container(path: str, container: ContainerSpec) -> Iterator[Finding]:
    if not container.image_uri.strip():
        yield _missing(f"{path}.image_uri", "Name an image in Artifact Registry.")
    elif "://" in container.image_uri:
        yield Finding(
            path=f"{path}.image_uri",
            rule="image-uri",
            reason=f"an image has no scheme: {quoted(container.image_uri)}.",
            fix=f"Write {container.image_uri.partition('://')[2]}.",
        )


def _package(path: str, package: PythonPackageSpec) -> Iterator[Finding]:
    image = package.executor_image_uri
    if not image:
        yield _missing(f"{path}.executor_image_uri", "Name one of Google's prebuilt training images.")
    elif not is_placeholder(image) and not _PREBUILT.match(image):
        yield Finding(
            path=f"{path}.executor_image_uri",
            rule="executor-image",
            reason=f"{quoted(image)} is none of Google's prebuilt training images, which the API asks for with a Python package.",
            fix="Take one of us-docker.pkg.dev/vertex-ai/training, or give your image as container_spec.image_uri.",
            severity="warning",
        )
    yield from _package_uris(f"{path}.package_uris", package.package_uris)
    module = package.python_module
    if not module:
        yield _missing(f"{path}.python_module", "Name the module to run, such as trainer.task.")
    elif not is_placeholder(module) and not _MODULE.fullmatch(module):
        dotted = module.removesuffix(".py").strip("/").replace("/", ".")
        yield Finding(
            path=f"{path}.python_module",
            rule="python-module",
            reason=f"{quoted(module)} is no module name; it is run as `python -m`.",
            fix=f"Write {dotted}."
            if _MODULE.fullmatch(dotted)
            else "Write a dotted name, such as trainer.task.",
        )


def _package_uris(path: str, uris: tuple[str, ...]) -> Iterator[Finding]:
    if not 1 <= len(uris) <= MAX_PACKAGES:
        yield Finding(
            path=path,
            rule="package-count",
            reason=f"there are {len(uris)} packages; a job takes 1 to {MAX_PACKAGES}.",
            fix="Give gs:// URIs of source distributions; leave to pip what is on an index.",
        )
    for index, uri in enumerate(uris):
        if not uri.startswith("gs://") and not is_placeholder(uri):
            yield Finding(
                path=f"{path}[{index}]",
                rule="package-uri",
                reason=f"{quoted(uri)} is not in Cloud Storage; packages are fetched from there.",
                fix="Upload the distribution and write gs://bucket/path/name-version.tar.gz.",
            )


def _env(env: tuple[EnvVar, ...], path: str) -> Iterator[Finding]:
    if len(env) > MAX_ENV:
        yield Finding(
            path=path,
            rule="env-count",
            reason=f"there are {len(env)} variables; a pool takes {MAX_ENV}.",
            fix="Put settings into the arguments, or into one file in Cloud Storage, and give its URI.",
        )
    seen: dict[str, int] = {}
    for index, variable in enumerate(env):
        if not variable.name or "=" in variable.name:
            yield Finding(
                path=f"{path}[{index}].name",
                rule="env-name",
                reason=f"{quoted(variable.name)} cannot name a variable.",
                fix="Give it a name without =.",
            )
        elif variable.name in seen:
            yield Finding(
                path=f"{path}[{index}].name",
                rule="env-twice",
                reason=f"{variable.name} stands twice, at {seen[variable.name]} and {index}; which one wins is not documented.",
                fix="Keep one.",
            )
        seen.setdefault(variable.name, index)


def _command_line(program: Program) -> Iterator[Finding]:
    """Exec form: the first word is a file to run, and nothing expands a variable of the environment."""
    command = program.command
    if command and re.search(r"\s", command[0].strip()) and not is_placeholder(command[0]):
        yield Finding(
            path=f"{program.path}.command[0]",
            rule="command-shell-line",
            reason="it is a line for a shell; a command is in exec form, its first word is the file to run and nothing else.",
            fix='Write ["bash", "-c", "<the line>"], or each word on its own.',
        )
        return
    if any(posixpath.basename(word) in _SHELLS for word in command):
        return
    found = next(((path, match) for path, word in program.words() if (match := _VARIABLE.search(word))), None)
    if found is not None:
        path, match = found
        starter = "no shell starts this program" if command else "an image's entry point is rarely a shell"
        yield Finding(
            path=path,
            rule="command-variable",
            reason=f"{match[0]} would reach the program as it stands: {starter}, and nothing else expands it.",
            fix='Write ["bash", "-c", "<the line>"], or read the variable (of the cluster: CLUSTER_SPEC) in the program.',
            severity="error" if command else "warning",
        )


def _missing(path: str, fix: str) -> Finding:
    return Finding(path=path, rule="required", reason="it is missing.", fix=fix)
