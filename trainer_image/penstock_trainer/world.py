"""The ranks of a run as one of them sees the others: its device, its process groups, and work that one does for all.

Work that one rank does for all ends on all ranks alike: were the error kept by the rank that met it, the others would
sit in their next collective until its timeout.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from penstock_trainer.errors import PeerError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import StorageUnavailableError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Of the control group, whose waits include uploads and downloads that one rank does for all. A peer that dies is noticed
# at once, and one that hangs by the group of the gradients.
_CONTROL_TIMEOUT = timedelta(hours=4)

# gloo has no exception of its own: what a lost or silent peer leads to is a RuntimeError with one of these.
_LOST_PEER = re.compile(
    r"gloo/|connectFullMesh|Connection (reset|closed|refused)|Broken pipe|Timed out waiting|NCCL|Socket Timeout"
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of one rank, for the others."""

    line: str
    is_transient: bool

    @classmethod
    def of(cls, error: Exception) -> Self:
        return cls(first_line(error), is_transient(error))

    def seen_from_another(self, *, rank: int) -> PeerError:
        return PeerError(f"rank {rank} failed: {self.line}", is_transient=self.is_transient)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The process groups are open from `join` to the end of its `with` block. Methods are collective unless they say so."""

    env: RankEnv
    device: torch.device
    control: dist.ProcessGroup
    """gloo over all ranks, apart from the group that gradients use: for what must not wait for the device."""
    timeout: timedelta = timedelta(minutes=10)
    """Of a collective of the gradients' group."""

    @classmethod
    @contextmanager
    def join(cls, env: RankEnv, *, timeout_seconds: int) -> Iterator[Self]:
        """Meet the other ranks, and leave them at the end, also on an error.

        Blocks until all ranks have come, `timeout_seconds` at most; a collective of the gradients' group fails after the
        same time. Raises torch.distributed.DistError or RuntimeError when ranks do not come together, see
        `is_lost_peer`.
        """
        timeout = timedelta(seconds=timeout_seconds)
        device = _device(env)
        backend = "nccl" if device.type == "cuda" else "gloo"
        _init_process_group(env, backend, timeout, device)
        try:
            control = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT))
            logger.info("device=%s backend=%s world_size=%d", device, backend, env.world_size)
            yield cls(env=env, device=device, control=control, timeout=timeout)
        finally:
            # A rank that ends without this can die of SIGABRT although its work is done.
            dist.destroy_process_group()

    def wait_for_device(self) -> None:
        """Until what was given to it is done; nothing on CPU. Not collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def own_store(self) -> Store:
        """A connection of its own to the store that the ranks met at, for another thread. Not collective."""
        store: Any = dist.distributed_c10d._get_default_store()
        return cast("Store", store.clone())

    def from_primary(self, produce: Callable[[], T]) -> T:
        """What `produce` returns on rank 0, on every rank. Blocks until rank 0 has it.

        An error is raised as it is on rank 0 and as PeerError on the others. The value must be picklable.
        """
        told: list[Any] = [None, None]
        error: Exception | None = None
        if self.env.is_primary:
            try:
                told = [produce(), None]
            except Exception as exc:
                error, told = exc, [None, _Failure.of(exc)]
        dist.broadcast_object_list(told, src=0, group=self.control)
        if error is not None:
            raise error
        if told[1] is not None:
            raise told[1].seen_from_another(rank=0)
        return cast("T", told[0])

    def decide(self, value: T, decide: Callable[[list[T]], list[T]]) -> T:
        """What rank 0 decides for this rank from every rank's value, by rank. Blocks until it has decided.

        An error of `decide` is raised as `from_primary` does. Values must be picklable; only rank 0 holds them all.
        """
        is_primary, ranks = self.env.is_primary, self.env.world_size
        values: list[Any] = [None] * ranks
        dist.gather_object(value, values if is_primary else None, dst=0, group=self.control)
        answers: list[tuple[Any, _Failure | None]] = []
        error: Exception | None = None
        if is_primary:
            try:
                answers = [(decided, None) for decided in decide(values)]
            except Exception as exc:
                error, answers = exc, [(None, _Failure.of(exc))] * ranks
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, answers if is_primary else None, src=0, group=self.control)
        if error is not None:
            raise error
        decided, failure = mine[0]
        if failure is not None:
            raise failure.seen_from_another(rank=0)
        return cast("T", decided)

    def once_per_node(self, work: Callable[[], None]) -> None:
        """Run `work` on local rank 0 of each node. Blocks until all have; an error anywhere is raised everywhere."""
        error: Exception | None = None
        if self.env.local_rank == 0:
            try:
                work()
            except Exception as exc:
                error = exc
        failures = self.gather(_Failure.of(error) if error else None)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise failure.seen_from_another(rank=rank)

    def total(self, value: int) -> int:
        """The sum of every rank's value. Blocks for the slowest rank as long as a collective of the gradients' group may
        take, and not for the device."""
        summed = torch.tensor(value)
        work = dist.all_reduce(summed, group=self.control, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        work.wait(self.timeout)
        return int(summed.item())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. The value must be picklable."""
        values: list[Any] = [None] * self.env.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


def is_transient(error: BaseException) -> bool:
    """Whether another try may go well where this one ended: a peer was lost, or storage did not answer, here or there."""
    if isinstance(error, PeerError):
        return error.is_transient
    return isinstance(error, StorageUnavailableError) or is_lost_peer(error)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is the trace of a rank or connection that went away, so that another try may help."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and _LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def first_line(error: Exception) -> str:
    """The error in one line: its class and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _device(env: RankEnv) -> torch.device:
    if not torch.cuda.is_available():
        cpus = len(os.sched_getaffinity(0))
        torch.set_num_threads(env.omp_num_threads or max(1, cpus // env.local_world_size))
        return torch.device("cpu")
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def _init_process_group(env: RankEnv, backend: str, timeout: timedelta, device: torch.device) -> None:
    """Under our launcher each attempt has keys of its own: ranks must not read the addresses of a dead attempt."""
    device_id = device if device.type == "cuda" else None
    if env.master_addr is None or env.master_port is None:
        store: Store = HashStore()
    elif env.owner is not None:
        tcp_store = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout)
        store = PrefixStore(env.owner.attempt, tcp_store)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device_id,
    )
