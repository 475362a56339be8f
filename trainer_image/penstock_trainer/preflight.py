"""What the ranks look at before a run begins: a job of many nodes ends here in seconds, naming the node that is bad.

Every rank answers through the store of the process groups, which needs no connection between ranks, so that each rank
can say who is missing. After that come the versions that have to agree, the all-reduce of the gradients' group, the
nodes' clocks, and the way from each node to the next.

Node-to-node bandwidth is taken through the control group, gloo over the host's network: NCCL would open, and keep, a
communicator for every pair. What NCCL makes of the accelerators' own network shows in the all-reduce.
"""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock_trainer.contract.fields import canonical_json, parse_json
from penstock_trainer.errors import PreflightError
from penstock_trainer.world import World

logger = logging.getLogger(__name__)

_KIB, _MIB = 2**10, 2**20
# A latency-bound size and one that fills a link: DDP's buckets are 25 MiB, Reduction Server's 64 MB.
_ALL_REDUCE_BYTES = {"cuda": (_MIB, 64 * _MIB), "cpu": (64 * _KIB, _MIB)}
_LINK_BYTES = {"cuda": 16 * _MIB, "cpu": _MIB}
_TRIES = 5
_DRIVER = Path("/proc/driver/nvidia/version")
_MUST_AGREE = {
    "torch_version": "torch",
    "nccl_version": "NCCL",
    "driver_version": "driver",
    "penstock_version": "penstock",
}
_SLOW_LINK = 0.5
_TELL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a node runs on; its local rank 0 speaks for it."""

    hostname: str
    torch_version: str
    penstock_version: str
    nccl_version: str = ""
    """Empty without accelerators, as `driver_version`."""
    driver_version: str = ""
    """NVIDIA's, as the kernel module tells; empty also where that is not to be seen."""
    device_name: str = "cpu"

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Of this process."""
        told = {
            "hostname": socket.gethostname(),
            "torch_version": torch.__version__,
            "penstock_version": _package_version(),
        }
        if device.type != "cuda":
            return cls(**told)
        nccl: tuple[int | str, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return cls(
            **told,
            nccl_version=".".join(map(str, nccl)),
            driver_version=_driver_version(),
            device_name=torch.cuda.get_device_name(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """That a rank is there, and where."""

    local_rank: int
    local_world_size: int
    facts: NodeFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """One size of the gradients' all-reduce, over all ranks."""

    num_bytes: int
    world_size: int
    seconds: float
    """Median of a few, of the slowest rank."""

    @property
    def algorithm_gb_per_s(self) -> float:
        """10^9 bytes of the tensor per second."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def bus_gb_per_s(self) -> float:
        """What each rank's link carries, to be held against its hardware: 2(n-1)/n of the above for n ranks.

        The factor is that of nccl-tests, doc/PERFORMANCE.md, section AllReduce.
        """
        return self.algorithm_gb_per_s * 2 * (self.world_size - 1) / self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockSkew:
    """How the nodes' clocks differ."""

    seconds: tuple[float, ...]
    """By node: its clock minus that of node 0."""
    uncertainty_seconds: float

    @property
    def spread_seconds(self) -> float:
        """Between the earliest and the latest clock."""
        return max(self.seconds) - min(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way from one node to the next, while all nodes send at once."""

    source: int
    target: int
    gb_per_s: float
    """10^9 bytes per second; the best of a few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What was found, the same on every rank."""

    nodes: tuple[NodeFacts, ...]
    all_reduces: tuple[AllReduce, ...]
    """Empty for a single rank."""
    clock_skew: ClockSkew | None
    """None on one node."""
    links: tuple[Link, ...]
    """A ring over the nodes; empty on one node."""
    warnings: tuple[str, ...]


def check(
    world: World,
    *,
    facts: NodeFacts | None = None,
    answer_seconds: float = 60.0,
    max_skew_seconds: float = 1.0,
) -> Preflight:
    """Look at the ranks, and say on rank 0 what was found. Collective; blocks seconds, and twice
    `answer_seconds` at most where a rank is late.

    `facts` replaces what this process would say of itself. Raises PreflightError, on every rank that is there, when
    one does not answer or cannot be reached (caused by the error of the store or of gloo, so it counts as a lost peer:
    another try may help) or when nodes differ in a version that has to agree (it does not). Clocks more than
    `max_skew_seconds` apart, devices that differ and slow links are warnings: such a run is slow or its logs are out of
    order, but it is right. Needs ranks that are numbered node by node. Keeps no memory of the device.
    """
    answers = gather_answers(world, facts or NodeFacts.of(world.device), timeout_seconds=answer_seconds)
    _meet(world, answers, timeout_seconds=answer_seconds)
    leaders = [rank for rank, answer in enumerate(answers) if answer.local_rank == 0]
    nodes = tuple(answers[leader].facts for leader in leaders)
    check_versions(nodes)
    clock_skew = _measure_clocks(world, leaders) if len(nodes) > 1 else None
    links = _measure_links(world, leaders) if len(nodes) > 1 else ()
    found = Preflight(
        nodes=nodes,
        all_reduces=_measure_all_reduces(world) if world.env.world_size > 1 else (),
        clock_skew=clock_skew,
        links=links,
        warnings=(
            *differing_devices(nodes),
            *(skewed_clocks(clock_skew, nodes, max_seconds=max_skew_seconds) if clock_skew else ()),
            *slow_links(links, nodes),
        ),
    )
    if world.env.is_primary:
        _log(found)
    return found


def gather_answers(world: World, facts: NodeFacts, *, timeout_seconds: float) -> list[Answer]:
    """Every rank's answer, by rank, through the store. Raises PreflightError naming the ranks that do not come in time."""
    env, store = world.env, world.control.get_group_store()
    # Keys stay in the store: a second check must not take the answers of the first.
    call = store.add(f"preflight/calls/{env.rank}", 1)
    answer = Answer(local_rank=env.local_rank, local_world_size=env.local_world_size, facts=facts)
    store.set(f"preflight/{call}/{env.rank}", canonical_json(answer))
    keys = [f"preflight/{call}/{rank}" for rank in range(env.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except dist.DistError as exc:
        present = {rank: _read_answer(store, key) for rank, key in enumerate(keys) if store.check([key])}
        missing = [rank for rank in range(env.world_size) if rank not in present]
        raise PreflightError(
            f"after {timeout_seconds:.0f} s without an answer of {place_missing(missing, present)}. All ranks had "
            "joined the run before; see the last lines of those ranks, and replace a node that hangs again."
        ) from exc
    return [_read_answer(store, key) for key in keys]


def place_missing(missing: Sequence[int], present: dict[int, Answer]) -> str:
    """The ranks that are missing, with their hosts where another rank of the same node has answered."""
    hosts = {
        rank - answer.local_rank + local_rank: answer.facts.hostname
        for rank, answer in present.items()
        for local_rank in range(answer.local_world_size)
    }
    return ", ".join(
        f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank} (nor of its node)"
        for rank in missing
    )


def check_versions(nodes: Sequence[NodeFacts]) -> None:
    """Raises PreflightError when nodes differ in a version that all have to share, with the nodes of each."""
    differing = [name for name in _MUST_AGREE if len({getattr(node, name) for node in nodes}) > 1]
    if differing:
        told = "; ".join(f"{_MUST_AGREE[name]}: {_by_value(nodes, name)}" for name in differing)
        raise PreflightError(
            f"the nodes differ in {told}. Give all worker pools one image and one machine type; where the driver "
            "differs, start the job again for other machines."
        )


def differing_devices(nodes: Sequence[NodeFacts]) -> list[str]:
    """A warning when nodes have different accelerators: every step takes as long as on the slowest."""
    if len({node.device_name for node in nodes}) < 2:
        return []
    return [f"the nodes differ in device: {_by_value(nodes, 'device_name')}"]


def clock_skew_of(readings: Sequence[Sequence[tuple[float, float]]]) -> ClockSkew:
    """The skew from each node's clock before and after the same barriers: `readings[node][barrier]`, seconds.

    The moment at which the last rank enters a barrier lies between the two readings of every node, so their midpoints
    are the same moment but for half their distance. The barrier counts whose longest such distance is the shortest.
    """
    widths = [max(after - before for before, after in barrier) for barrier in zip(*readings, strict=True)]
    best = min(range(len(widths)), key=widths.__getitem__)
    midpoints = [sum(node[best]) / 2 for node in readings]
    return ClockSkew(
        seconds=tuple(midpoint - midpoints[0] for midpoint in midpoints), uncertainty_seconds=widths[best]
    )


def skewed_clocks(skew: ClockSkew, nodes: Sequence[NodeFacts], *, max_seconds: float) -> list[str]:
    """A warning for each node whose clock is surely further than `max_seconds` from the median of all."""
    median = statistics.median(skew.seconds)
    return [
        f"the clock of {_place(node, nodes)} is {seconds - median:+.3f} s off the others' "
        f"(known to {skew.uncertainty_seconds:.3f} s): log lines and times of failure of this node mislead"
        for node, seconds in enumerate(skew.seconds)
        if abs(seconds - median) - skew.uncertainty_seconds > max_seconds
    ]


def slow_links(links: Sequence[Link], nodes: Sequence[NodeFacts]) -> list[str]:
    """A warning for each link slower than half of the median one. Of two links: slower than a third of the other."""
    if not links:
        return []
    median = statistics.median(link.gb_per_s for link in links)
    return [
        f"the link from {_place(link.source, nodes)} to {_place(link.target, nodes)} carries {link.gb_per_s:.3g} GB/s, "
        f"the median link {median:.3g}"
        for link in links
        if link.gb_per_s < _SLOW_LINK * median
    ]


def _meet(world: World, answers: Sequence[Answer], *, timeout_seconds: float) -> None:
    """All ranks answer, now over the connections between them. Rank 0 learns, and tells, which cannot be reached."""
    try:
        dist.monitored_barrier(world.control, timedelta(seconds=timeout_seconds), wait_all_ranks=True)
    except RuntimeError as exc:
        unreached = ", ".join(
            f"rank {rank} on {answers[rank].facts.hostname}" for rank in _unreached(world, str(exc))
        )
        raise PreflightError(
            f"{unreached} cannot be reached within {timeout_seconds:.0f} s, though all ranks answer the store. Replace "
            "a node that is named again."
        ) from dist.DistNetworkError(str(exc))  # gloo's own is any RuntimeError, see world.is_lost_peer


def _unreached(world: World, message: str) -> list[int]:
    """The ranks that rank 0 finds in gloo's message. To the others, who wait for rank 0 alone, it tells them."""
    store, key = world.control.get_group_store(), "preflight/unreached"
    if world.env.is_primary:
        found = re.search(r"Ranks? (\d[\d, ]*) failed to pass", message)
        ranks = [int(rank) for rank in found[1].split(",")] if found else [0]
        store.set(key, json.dumps(ranks))
        return ranks
    try:
        store.wait([key], timedelta(seconds=_TELL_SECONDS))
    except dist.DistError:
        return [0]
    told: list[int] = json.loads(store.get(key))
    return told


def _measure_all_reduces(world: World) -> tuple[AllReduce, ...]:
    """In the gradients' group. Raises PreflightError when a sum is wrong."""
    sizes = _ALL_REDUCE_BYTES[world.device.type]
    medians = [_time_all_reduce(world, num_bytes) for num_bytes in sizes]
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    slowest = [max(seconds) for seconds in zip(*world.gather(medians), strict=True)]
    return tuple(
        AllReduce(num_bytes=num_bytes, world_size=world.env.world_size, seconds=seconds)
        for num_bytes, seconds in zip(sizes, slowest, strict=True)
    )


def _time_all_reduce(world: World, num_bytes: int) -> float:
    """Seconds on this rank, the median of a few after one that warms up and whose sum is looked at."""
    tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=world.device)
    dist.all_reduce(tensor)
    bad = world.gather(bool((tensor != world.env.world_size).any()))
    if any(bad):
        ranks = ", ".join(str(rank) for rank, is_bad in enumerate(bad) if is_bad)
        raise PreflightError(f"an all-reduce of ones gives wrong sums on rank {ranks}; replace that node.")
    tensor.zero_()
    seconds = []
    for _ in range(_TRIES):
        _synchronize(world.device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        _synchronize(world.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _measure_clocks(world: World, leaders: Sequence[int]) -> ClockSkew:
    readings = []
    for _ in range(_TRIES):
        dist.barrier(world.control)  # all enter the next one at about the same time
        before = time.time()
        dist.barrier(world.control)
        readings.append((before, time.time()))
    told = world.gather(readings)
    return clock_skew_of([told[leader] for leader in leaders])


def _measure_links(world: World, leaders: Sequence[int]) -> tuple[Link, ...]:
    """Each node's local rank 0 sends to the next node's, all at once; the receiver's clock counts."""
    num_bytes = _LINK_BYTES[world.device.type]
    best = math.inf
    for _ in range(_TRIES):
        dist.barrier(world.control)
        if world.env.local_rank == 0:
            best = min(best, _time_exchange(world, leaders, num_bytes))
    told = world.gather(best)
    num_nodes = len(leaders)
    return tuple(
        Link(source=(node - 1) % num_nodes, target=node, gb_per_s=num_bytes / told[leader] / 1e9)
        for node, leader in enumerate(leaders)
    )


def _time_exchange(world: World, leaders: Sequence[int], num_bytes: int) -> float:
    node = leaders.index(world.env.rank)
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    started = time.perf_counter()
    sending = dist.isend(outgoing, leaders[(node + 1) % len(leaders)], group=world.control)
    dist.recv(incoming, leaders[node - 1], group=world.control)
    seconds = time.perf_counter() - started
    if sending is not None:
        sending.wait()
    return seconds


def _log(found: Preflight) -> None:
    for reduce in found.all_reduces:
        logger.info(
            "preflight: all-reduce %s over %d ranks %.2f ms, %.3g GB/s (bus %.3g)",
            _size(reduce.num_bytes),
            reduce.world_size,
            reduce.seconds * 1e3,
            reduce.algorithm_gb_per_s,
            reduce.bus_gb_per_s,
        )
    if found.clock_skew:
        logger.info("preflight: clocks of %d nodes at most %.1f ms apart (known to %.1f ms)", len(found.nodes),
                    found.clock_skew.spread_seconds * 1e3, found.clock_skew.uncertainty_seconds * 1e3)  # fmt: skip
    if found.links:
        rates = [link.gb_per_s for link in found.links]
        logger.info(
            "preflight: %d links between nodes, %.3g to %.3g GB/s over the host's network",
            len(rates), min(rates), max(rates),
        )  # fmt: skip
    node = found.nodes[0]
    versions = ", ".join(
        f"{told} {getattr(node, name)}" for name, told in _MUST_AGREE.items() if getattr(node, name)
    )
    logger.info("preflight: %d node(s) with %s on %s", len(found.nodes), versions, node.device_name)
    for warning in found.warnings:
        logger.warning("preflight: %s", warning)


def _by_value(nodes: Sequence[NodeFacts], name: str) -> str:
    """`2.13.0 on node 0 (host-a), node 2 (host-c); 2.12.0 on node 1 (host-b)`, the values of most nodes first."""
    places: dict[str, list[str]] = {}
    for index, node in enumerate(nodes):
        places.setdefault(getattr(node, name) or "none", []).append(_place(index, nodes))
    told = sorted(places.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value} on {' and '.join(where)}" for value, where in told)


def _place(node: int, nodes: Sequence[NodeFacts]) -> str:
    return f"node {node} ({nodes[node].hostname})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB" if num_bytes >= _MIB else f"{num_bytes // _KIB} KiB"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_answer(store: Store, key: str) -> Answer:
    return parse_json(Answer, store.get(key), f"{key} of the store")


def _package_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"


def _driver_version() -> str:
    """As in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...`."""
    try:
        found = re.search(r"Module\D*?\s(\d+(?:\.\d+)+)", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
