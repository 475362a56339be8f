"""What the pools of a job hold, as the rules look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock_components.jobs.messages import CustomJobSpec, EnvVar, WorkerPoolSpec
from penstock_components.jobs.reader import PLACEHOLDER
from penstock_components.jobs.roles import SERVERS
from penstock_components.jobs.rules.context import Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a pool runs, given as a container or as a Python package."""

    index: int
    """Of the pool."""
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
    for index, path, pool in filled_pools(spec):
        container, package = pool.container_spec, pool.python_package_spec
        if container is not None:
            yield Program(
                index=index,
                path=f"{path}.container_spec",
                pool=pool,
                command=container.command,
                args=container.args,
                env=container.env,
            )
        if package is not None:
            yield Program(
                index=index,
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


def may_be_on_persistent_resource(spec: CustomJobSpec, context: Context) -> bool:
    """Whether it takes such machines, or that is decided while a pipeline runs."""
    return on_persistent_resource(spec) or not context.knows("persistent_resource_id")


def undecided(spec: CustomJobSpec) -> frozenset[str]:
    """Fields of a job spec, of those that rules look at together, that hold a placeholder of a pipeline."""
    scheduling, output, psc = spec.scheduling, spec.base_output_directory, spec.psc_interface_config
    texts = {
        "scheduling.strategy": scheduling.strategy if scheduling is not None else "",
        "base_output_directory": output.output_uri_prefix if output is not None else "",
        "psc_interface_config": psc.network_attachment if psc is not None else "",
        **{
            name: getattr(spec, name)
            for name in ("network", "service_account", "tensorboard", "experiment", "persistent_resource_id")
        },
    }
    return frozenset(name for name, text in texts.items() if is_placeholder(text))
