"""torch's flight recorder: the last collectives of a rank, and what is left of them when one hangs or a peer is lost.

<checkpoint root>/flight/<attempt>-rank<rank>.json   {"error", "place", "gloo": <dump>, "nccl": <dump>}

A dump is what torch writes (torch/csrc/distributed/c10d/FlightRecorder.hpp, format 2.10 in torch 2.13), as JSON: pickle
would have to be trusted by whoever reads it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from penstock_trainer.storage import join, storage_for

logger = logging.getLogger(__name__)

_HEARING_SECONDS = 1.0
"""For the other ranks to say where they are; the launcher leaves a rank 10 s after the first has failed."""

_LATE = 0.8
"""Share of its timeout after which a collective is taken for hanging."""
_MOST_SECONDS_BETWEEN_LOOKS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One entry of a flight recorder."""

    group: str
    """Of its process group: "gloo:0"."""
    number: int
    """Within the group, from 1; ranks that are together are at the same number."""
    operation: str
    sizes: Sequence[Sequence[int]]
    """Shapes of its inputs."""
    created_ns: int
    """Since the epoch, by the rank's clock."""
    timeout_ms: float
    """Of its group."""
    duration_ms: float | None
    """Of its kernel; only NCCL tells, and only of what has ended."""
    is_pending: bool

    def told(self, now_ns: int) -> str:
        """For people: `all_reduce #1412 [65536] of gloo:0 since 600 s`."""
        shapes = " ".join(str(list(size)) for size in self.sizes)
        seconds = (now_ns - self.created_ns) * 1e-9
        return f"{self.operation} #{self.number} {shapes} of {self.group} since {seconds:.0f} s"


def remember(records: int, environ: MutableMapping[str, str]) -> None:
    """Have this process remember its last `records` collectives, or none for 0. Before the first process group.

    NCCL then also records when its kernels begin, without which they have no duration.
    """
    environ["TORCH_FR_BUFFER_SIZE"] = str(records)
    if records:
        environ["TORCH_NCCL_ENABLE_TIMING"] = "1"


def dumps(*, with_entries: bool = True) -> dict[str, Any]:
    """By backend, what torch's recorders hold. NCCL has one of its own, which builds for CPU are without.

    2000 entries take some 40 ms of a CPU; how far the groups have come is there without them too.
    """
    of_gloo = c10d._dump_fr_trace_json  # type: ignore[attr-defined]  # torch's stub is without it
    told = {"gloo": json.loads(of_gloo(with_entries, False))}
    of_nccl = getattr(c10d, "_dump_nccl_trace_json", None)
    if of_nccl is not None:
        told["nccl"] = json.loads(of_nccl(with_entries, False))
    return told


def collectives(told: Mapping[str, Any]) -> Iterator[Collective]:
    """The entries of `dumps`, by backend and in the order of their creation; point-to-point calls are left out.

    An entry is pending by its state where that is kept. gloo's is not (torch 2.13): there, what comes after the last that
    its group has completed.
    """
    for backend, dump in told.items():
        status = dump.get("pg_status", {})
        for entry in dump.get("entries", ()):
            library, _, operation = entry["profiling_name"].partition(":")
            if entry["is_p2p"] or library != backend:  # one recorder may hold what another has too
                continue
            number = entry["collective_seq_id"]
            of_group = status.get(str(entry["pg_id"]), {})
            completed = int(of_group.get("last_completed_collective", -1))
            yield Collective(
                group=f"{backend}:{entry['process_group'][0]}",
                number=number,
                operation=operation,
                sizes=entry["input_sizes"],
                created_ns=entry["time_created_ns"],
                timeout_ms=entry["timeout_ms"],
                duration_ms=entry.get("duration_ms"),
                is_pending=entry["state"] != "completed" and number > completed,
            )


def pending(told: Mapping[str, Any]) -> list[Collective]:
    """What the rank waits in, the oldest first; one for each group, as the others of a group wait for that one."""
    first: dict[str, Collective] = {}
    for collective in collectives(told):
        if collective.is_pending:
            first.setdefault(collective.group, collective)
    return sorted(first.values(), key=lambda collective: collective.created_ns)


class FlightRecord:
    """What a rank leaves of its last collectives, once."""

    def __init__(
        self, *, root_uri: str, attempt: str, rank: int, world_size: int, store: Store | None
    ) -> None:
        """`store` is one that all ranks reach, for them to tell each other where they are."""
        self.attempt = attempt
        """May be set until the record is left: a rank without our launcher learns it late."""
        self._root_uri = root_uri
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._lock = threading.Lock()
        self._is_left = False

    def leave(self, error: str) -> None:
        """Write the dump to the checkpoint root, and log where the rank is and who is not there; the first time.

        For a rank that a collective has failed. Blocks for about 1 s and on storage. Never raises: what went wrong before
        is what has to be told.
        """
        with self._lock:
            if self._is_left:
                return
            self._is_left = True
            try:
                self._leave(error)
            except Exception:
                logger.warning("rank %d could not leave its last collectives", self._rank, exc_info=True)

    @contextmanager
    def watch(self, timeout_seconds: float) -> Iterator[None]:
        """Within it a thread leaves the record of a collective that has taken most of its group's timeout.

        NCCL's watchdog ends the process at the timeout, and no exception comes up in it. The thread looks 20 times within
        `timeout_seconds`, and reads the entries only while a group stands still.
        """
        is_over = threading.Event()

        def look() -> None:
            stood = ""
            while not is_over.wait(min(timeout_seconds / 20, _MOST_SECONDS_BETWEEN_LOOKS)):
                stands = _standing()
                late = self._late() if stands and stands == stood else None
                stood = stands
                if late is not None:
                    self.leave(f"{late.operation} #{late.number} has taken most of its timeout")
                    return

        thread = threading.Thread(target=look, name="flight record", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _late(self) -> Collective | None:
        waits, now_ns = pending(dumps()), time.time_ns()
        return next(
            (each for each in waits if now_ns - each.created_ns > _LATE * each.timeout_ms * 1e6), None
        )

    def _leave(self, error: str) -> None:
        told = dumps()
        if not any(dump.get("entries") for dump in told.values()):
            return
        line, at = _place(told)
        if self._store is not None:
            line += _absent(told, at, self._rank, self._world_size, self._store)
        logger.error("rank %d %s", self._rank, line)
        uri = join(self._root_uri, "flight", f"{self.attempt}-rank{self._rank}.json")
        body = {"error": error, "place": line, **told}
        storage_for(uri).write(uri, json.dumps(body).encode(), content_type="application/json")
        logger.error("rank %d left its last collectives in %s", self._rank, uri)


def open_store() -> Store | None:
    """The store over which the ranks met; None when there is none, as in a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _standing() -> str:
    """How far each group has come that has something under way; empty when none has."""
    try:
        told = dumps(with_entries=False)
    except Exception:
        logger.warning("torch's flight recorder cannot be read", exc_info=True)
        return ""
    groups = {
        f"{backend}:{group}": [status["last_enqueued_collective"], status["last_completed_collective"]]
        for backend, dump in told.items()
        for group, status in dump.get("pg_status", {}).items()
    }
    waiting = {group: numbers for group, numbers in groups.items() if numbers[0] != numbers[1]}
    return json.dumps(waiting, sort_keys=True) if waiting else ""


def _place(told: Mapping[str, Any]) -> tuple[str, Collective]:
    """Where the rank is, for people, and the collective that is meant.

    gloo counts what has failed as completed (torch 2.13). So where nothing is pending it is the last one entered, which
    need not be the one that failed where several were under way.
    """
    now_ns = time.time_ns()
    waits = pending(told)
    if waits:
        return f"waits in {', '.join(collective.told(now_ns) for collective in waits)}", waits[0]
    last = max(collectives(told), key=lambda collective: collective.created_ns)
    return f"was last in {last.told(now_ns)}", last


def _absent(told: Mapping[str, Any], at: Collective, rank: int, world_size: int, store: Store) -> str:
    """Who has not entered the collective in which this rank is, as far as the others say where they are."""
    reached: dict[str, int] = {}
    for collective in collectives(told):
        reached[collective.group] = max(collective.number, reached.get(collective.group, 0))
    try:
        others = _heard(reached, rank, world_size, store)
    except RuntimeError:  # also torch's DistError: whoever kept the store is gone
        return "; the other ranks cannot be asked any more"
    late = [
        f"rank {other} is at #{others[other].get(at.group, 0)}"
        for other in sorted(others)
        if at.group in others[other] and others[other][at.group] < at.number
    ]
    silent = [other for other in range(world_size) if other != rank and other not in others]
    if silent:
        late.append(f"nothing is heard of rank {', '.join(map(str, silent))}")
    return "; " + "; ".join(late) if late else ""


def _heard(reached: Mapping[str, int], rank: int, world_size: int, store: Store) -> dict[int, dict[str, int]]:
    """By other rank, the number that each of its groups has reached; of those that say so in time.

    Raises RuntimeError when the store is gone before any has.
    """
    heard: dict[int, dict[str, int]] = {}
    deadline = time.monotonic() + _HEARING_SECONDS
    try:
        store.set(f"flight/{rank}", json.dumps(reached))
        while len(heard) < world_size - 1 and time.monotonic() < deadline:
            for other in set(range(world_size)) - {rank} - set(heard):
                if store.check([f"flight/{other}"]):
                    heard[other] = json.loads(store.get(f"flight/{other}"))
            time.sleep(0.05)
    except RuntimeError:
        if not heard:
            raise
    return heard
