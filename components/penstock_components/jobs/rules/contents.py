"""What the pools of a job hold, as the rules look at it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock_components.jobs.messages import CustomJobSpec, EnvVar, WorkerPoolSpec
from penstock_components.jobs.reader import PLACEHOLDER

PRIMARY, WORKERS, SERVERS, EVALUATORS = range(4)
ROLES = ("the primary", "workers", "parameter servers or a Reduction Server", "evaluators")
"""By index of the pool."""
_REDUCER_IMAGE = re.compile(r"reduction[-_]?server", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a pool runs, given as a container or as a Python package."""

    path: str
    """Of its spec: `worker_pool_specs[0].container_spec`."""
    pool: WorkerPoolSpec
    command: tuple[str, ...]
    """Empty for a Python package."""
    args: tuple[str, ...]
    env: tuple[EnvVar, ...]

    def words(self) -> Iterator[tuple[str, str]]:
        """Each word of the command line with its path."""
        for name, words in (("command", self.command), ("args", self.args)):
            yield from ((f"{self.path}.{name}[{index}]", word) for index, word in enumerate(words))


def filled_pools(spec: CustomJobSpec) -> Iterator[tuple[int, str, WorkerPoolSpec]]:
    """Index, path and pool of those that are no empty placeholder."""
    for index, pool in enumerate(spec.worker_pool_specs):
        if pool != WorkerPoolSpec():
            yield index, f"worker_pool_specs[{index}]", pool


def programs(spec: CustomJobSpec) -> Iterator[Program]:
    """What runs, pool by pool."""
    for _, path, pool in filled_pools(spec):
        container, package = pool.container_spec, pool.python_package_spec
        if container is not None:
            yield Program(
                path=f"{path}.container_spec",
                pool=pool,
                command=container.command,
                args=container.args,
                env=container.env,
            )
        if package is not None:
            yield Program(
                path=f"{path}.python_package_spec",
                pool=pool,
                command=(),
                args=package.args,
                env=package.env,
            )


def num_nodes(spec: CustomJobSpec) -> int:
    """Machines of pools 0 and 1: those that train."""
    return sum(max(0, pool.replica_count) for pool in spec.worker_pool_specs[:SERVERS])


def is_placeholder(text: str) -> bool:
    """Whether a pipeline puts the value in when it runs, so that nothing can be said of it before."""
    return PLACEHOLDER.search(text) is not None


def on_persistent_resource(spec: CustomJobSpec) -> bool:
    """Whether the job surely takes machines that are held already; a placeholder may turn out empty."""
    return bool(spec.persistent_resource_id) and not is_placeholder(spec.persistent_resource_id)


def is_reduction_server(pool: WorkerPoolSpec) -> bool:
    """Whether a pool runs reducers, be it from a copy of Google's image, which is another rule's matter."""
    image = pool.container_spec.image_uri if pool.container_spec is not None else ""
    return _REDUCER_IMAGE.search(image) is not None
