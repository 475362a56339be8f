"""Reduction Server: the pool of reducers, how large it must be, and whether it is worth having.

Reducers sum the gradients of NCCL's all-reduce for the nodes. Facts are from Vertex AI documentation,
training/distributed-training; what follows from them is computed in `all_reduce` and `reducer_sizing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock_components.jobs.all_reduce import communication_gain, ring_gain, traffic_share
from penstock_components.jobs.findings import Finding, JobSpecError, Severity, quoted
from penstock_components.jobs.messages import ContainerSpec, MachineSpec, WorkerPoolSpec
from penstock_components.jobs.reducer_sizing import Sizing, sizing
from penstock_components.jobs.roles import SERVERS, WORKERS
from penstock_components.jobs.topology import network_gbps
from penstock_components.machines.catalogue import gpu_machines, kind_of, reducer_network_gbps

BUCKET_CAP_MB = 64
"""DDP's bucket_cap_mb that Google recommends with reducers; the default of the trainer's engine.bucket_bytes."""
_MULTI_REGIONS = {
    "us": "us", "northamerica": "us", "southamerica": "us", "europe": "europe", "africa": "europe",
    "asia": "asia", "australia": "asia", "me": "asia",
}  # fmt: skip
_REPOSITORY = "vertex-ai-restricted/training/reductionserver"
_IMAGE = f"{{}}-docker.pkg.dev/{_REPOSITORY}:latest"
IMAGES = tuple(_IMAGE.format(multi_region) for multi_region in ("us", "europe", "asia"))
"""The only images of the reducer; they keep Google's tag."""
_GOOGLES = re.compile(rf"(?:^|/){_REPOSITORY}(?:[:@]|$)")
_NAMED_LIKE_IT = re.compile(r"(?:^|/)reduction[-_]?server(?:[:@][^/]*)?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionServer:
    """The reducers of one job."""

    replica_count: int
    machine_type: str = "n1-highcpu-16"
    """Recommended by Google's guide, with 32 Gbit/s of egress."""

    def pool(self, location: str) -> WorkerPoolSpec:
        """The pool for index 2; the image of the multi-region nearest to `location`.

        Raises MachineError for a machine type whose egress is not known, JobSpecError for a location of no known region.
        """
        reducer_network_gbps(self.machine_type)
        return WorkerPoolSpec(
            machine_spec=MachineSpec(machine_type=self.machine_type),
            replica_count=self.replica_count,
            container_spec=ContainerSpec(image_uri=image_uri(location)),
        )


def image_uri(location: str) -> str:
    """Google's image of the reducer nearest to a region. Raises JobSpecError for a location of no known region."""
    multi_region = _multi_region(location)
    if multi_region is None:
        raise JobSpecError(
            f"location {location!r} belongs to none of the regions {', '.join(sorted(_MULTI_REGIONS))}."
        )
    return _IMAGE.format(multi_region)


def advice(
    pools: Sequence[WorkerPoolSpec], *, strategy: str, scheduling_strategy: str, location: str
) -> Iterator[Finding]:
    """What is wrong with the reducers of a job, and when they bring less than they seem to; nothing without reducers.

    `strategy` is the trainer's engine.strategy. It is empty for other programs, whose pool at index 2 may be parameter
    servers: there reducers are known by Google's image. An empty `location` means any.
    """
    if not strategy:
        yield from _of_copy(pools)
    for index in _reducer_pools(pools, strategy):
        yield from _of_pool(pools[index], f"worker_pool_specs[{index}]", location)
        if scheduling_strategy == "FLEX_START":
            yield _found(
                "scheduling.strategy", "reducers-flex-start",
                "FLEX_START wants the same machine in all pools, which reducers cannot have.",
                "Take STANDARD or SPOT, or leave the Reduction Server out.",
            )  # fmt: skip
        yield from _of_benefit(pools, strategy) if index == SERVERS else [_misplaced(index)]


def is_reduction_server(pool: WorkerPoolSpec) -> bool:
    """Whether a pool runs reducers: Google's image, of whatever host and tag."""
    return _GOOGLES.search(_image(pool)) is not None


def _of_copy(pools: Sequence[WorkerPoolSpec]) -> Iterator[Finding]:
    """An image of the same name in their place: it may be a copy of the reducer, or anything else."""
    for pool in pools[SERVERS : SERVERS + 1]:
        if _NAMED_LIKE_IT.search(_image(pool)) and not is_reduction_server(pool):
            yield _found(
                f"worker_pool_specs[{SERVERS}].container_spec.image_uri", "reducers-image",
                f"{quoted(_image(pool))} is named like the reducer, but is none of Google's three images of it.",
                f"Write {_IMAGE.format('us')} if reducers are meant.", "warning",
            )  # fmt: skip


def _reducer_pools(pools: Sequence[WorkerPoolSpec], strategy: str) -> list[int]:
    places = [index for index, pool in enumerate(pools) if is_reduction_server(pool)]
    if strategy and len(pools) > SERVERS and pools[SERVERS] != WorkerPoolSpec():
        places.append(SERVERS)  # this trainer has no parameter servers
    return sorted(set(places))


def _of_pool(pool: WorkerPoolSpec, path: str, location: str) -> Iterator[Finding]:
    """What the pool itself must be like."""
    machine, container = pool.machine_spec or MachineSpec(), pool.container_spec or ContainerSpec()
    if (
        machine.accelerator_type
        or machine.accelerator_count
        or kind_of(machine.machine_type) in ("gpu", "tpu")
    ):
        yield _found(
            f"{path}.machine_spec", "reducers-accelerator",
            f"reducers use no accelerator, but {machine.machine_type} is given with one.",
            "Use n1-highcpu-16 without accelerator_type and accelerator_count.",
        )  # fmt: skip
    elif machine.machine_type and network_gbps(machine) is None:
        yield _found(
            f"{path}.machine_spec.machine_type", "reducers-machine",
            f"the egress of {machine.machine_type} is not documented, so whether {pool.replica_count} reducers suffice is "
            "not known.",
            "Use n1-highcpu-16 or n2-highcpu-16, which Google recommends.", "warning",
        )  # fmt: skip
    for name in ("command", "args"):
        if getattr(container, name):
            yield _found(
                f"{path}.container_spec.{name}", "reducers-program",
                "the reducer's image starts by itself.", "Remove it: image_uri is all that reducers need.",
            )  # fmt: skip
    yield from _of_image(container.image_uri, f"{path}.container_spec.image_uri", location)


def _of_image(image: str, path: str, location: str) -> Iterator[Finding]:
    nearest = _IMAGE.format(_multi_region(location) or "us")
    if image not in IMAGES:
        yield _found(
            path, "reducers-image", f"{quoted(image)} is none of Google's three images of the reducer.", f"Write {nearest}."
        )  # fmt: skip
    elif _multi_region(location) is not None and image != nearest:
        yield _found(
            path, "reducers-image-region", f"the image is not of the multi-region nearest to {location}.",
            f"Write {nearest}.", "warning",
        )  # fmt: skip


def _misplaced(index: int) -> Finding:
    return _found(
        f"worker_pool_specs[{index}]", "reducers-place",
        f"reducers stand at index {index}, where they would be taken for other replicas; only the pool at index 2 is "
        "theirs.",
        "Put the primary into pool 0, all other nodes into pool 1 and the reducers into pool 2; with one node leave them "
        "out.",
    )  # fmt: skip


def _of_benefit(pools: Sequence[WorkerPoolSpec], strategy: str) -> Iterator[Finding]:
    """Whether reducers are worth having here; of several reasons not to have them the first suffices."""
    path = f"worker_pool_specs[{SERVERS}]"
    if pools[WORKERS].replica_count < 1:
        yield _found(
            f"worker_pool_specs[{WORKERS}]", "reducers-nodes",
            "pool 1 is empty: a Reduction Server needs at least 2 nodes.",
            "Put nodes into pool 1, or leave pool 2 out.",
        )  # fmt: skip
        return
    sized = sizing(pools)
    if sized is None:
        return
    share = traffic_share(strategy)
    if not _has_gpus(pools):
        reason = f"reducers serve NCCL between GPUs, and {sized.node_types} has none here."
    elif share is not None and share.share == 0:
        reason = f"reducers bring nothing to {strategy}: {share.reason}."
    elif sized.num_nodes <= 2:
        reason = f"{sized.told}."
    else:
        yield from _of_gain(pools, sized, strategy)
        return
    yield _found(path, "reducers-bring-nothing", reason, "Leave the pool out.", "warning")


def _of_gain(pools: Sequence[WorkerPoolSpec], sized: Sizing, strategy: str) -> Iterator[Finding]:
    """Why the gain is not what one may expect."""
    path, most = f"worker_pool_specs[{SERVERS}]", ring_gain(sized.num_nodes)
    share = traffic_share(strategy)
    if sized.reducers_needed is not None and sized.num_reducers < sized.reducers_needed:
        yield _found(
            f"{path}.replica_count", "reducers-too-few",
            f"{sized.num_reducers} x {sized.reducer_type} have {sized.num_reducers * (sized.reducer_gbps or 0):g} of the "
            f"nodes' {sized.nodes_gbps:g} Gbit/s, a bottleneck: the all-reduce is {sized.gain:.2f}x as fast as a ring, "
            f"where enough reducers make it {most:.2f}x.",
            f"Set replica_count to {sized.reducers_needed}.", "warning",
        )  # fmt: skip
    elif sized.num_nodes < 4:
        yield _found(
            path, "reducers-few-nodes",
            f"on {sized.num_nodes} nodes an all-reduce becomes at most {most:.2f}x as fast.",
            "See whether that is worth the reducers' price.", "warning",
        )  # fmt: skip
    if share is not None and (share.share < 1 or not share.is_documented):
        whole = communication_gain(share.share, most)
        yield _found(
            path, "reducers-traffic",
            f"{strategy}: {share.reason}. Communication between {sized.num_nodes} nodes becomes at most {whole:.2f}x as "
            "fast.",
            "See whether that is worth the reducers' price.", "warning",
        )  # fmt: skip
    later = [name for name in _machine_types(pools) if name.startswith(("a3-", "a4-", "a4x-"))]
    if later:
        yield _found(
            path, "reducers-undocumented",
            f"Google documents Reduction Server for N1 and A2, not for {later[0]}{_plugin_of(later[0])}.",
            "Leave the pool out unless you have measured a gain.", "warning",
        )  # fmt: skip


def _plugin_of(machine_type: str) -> str:
    has_gpudirect = any(row.has_gpudirect for row in gpu_machines() if row.machine_type == machine_type)
    return ", whose GPUDirect has an NCCL network plugin of its own" if has_gpudirect else ""


def _has_gpus(pools: Sequence[WorkerPoolSpec]) -> bool:
    specs = [pool.machine_spec for pool in pools[:SERVERS] if pool.machine_spec is not None]
    return any(kind_of(spec.machine_type, spec.accelerator_type) != "cpu" for spec in specs)


def _machine_types(pools: Sequence[WorkerPoolSpec]) -> list[str]:
    return [pool.machine_spec.machine_type for pool in pools[:SERVERS] if pool.machine_spec is not None]


def _image(pool: WorkerPoolSpec) -> str:
    return pool.container_spec.image_uri if pool.container_spec is not None else ""


def _multi_region(location: str) -> str | None:
    return _MULTI_REGIONS.get(location.partition("-")[0])


def _found(path: str, rule: str, reason: str, fix: str, severity: Severity = "error") -> Finding:
    return Finding(path=path, rule=rule, reason=reason, fix=fix, severity=severity)
