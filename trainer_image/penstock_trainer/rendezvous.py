"""Where the launchers of a job meet: a TCPStore that the primary's launcher hosts on its CLUSTER_SPEC address.

Through it the launchers agree on the ranks and on what all ranks are told, say that they live, and tell each other how
their ranks ended. The ranks of our trainer use the same store for their process group, so one open port is enough.

A job runs in rounds: all ranks are started, all end. What is said about one round stands under keys of its own
(`launch/<restarts before it>/...`), so nothing of a round is taken for news of the next. The primary publishes the plan
of the next round before the verdict that sends all launchers there, and gives that verdict when every node has told how
its ranks ended: no rank of a round lives when one of the next starts.

The listening socket is bound here and handed over, because torch's own listens on every address: two jobs of one
machine, each on a loopback address of its own, could then not both use the port that Vertex gives.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from penstock_trainer.cluster import Cluster
from penstock_trainer.contract.fields import canonical_json, from_dict
from penstock_trainer.outcome import NodeEnd, Verdict

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
logger = logging.getLogger(__name__)

# The primary listens before it has imported torch (2 s, much longer from a cold disk), so a worker that is connected
# may wait this long for the first answer. Afterwards no call waits for anything but the network.
_SERVE_TIMEOUT = timedelta(seconds=60)
_CALL_TIMEOUT = timedelta(seconds=10)
_POLL_SECONDS = 0.1


class RendezvousError(Exception):
    """The launchers did not come together, or lost each other: a fault of machines, so another try may help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the primary decides for all nodes before any rank of a round starts."""

    local_world_sizes: tuple[int, ...]
    """Ranks of each node, by node rank."""
    env: Mapping[str, str]
    """Environment that all ranks of the round share."""
    max_restarts: int
    """Rounds that may follow the first."""
    restart: int = 0
    """Rounds before this one."""

    def first_rank(self, node_rank: int) -> int:
        """The global rank of a node's local rank 0."""
        return sum(self.local_world_sizes[:node_rank])

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(self.local_world_sizes)


@dataclass(frozen=True, slots=True)
class Listener:
    """The primary's socket, listening; clients queue until the store serves it."""

    socket: socket.socket
    address: str
    """Where processes of the primary itself reach it."""
    port: int


def listen(cluster: Cluster) -> Listener:
    """Bind the primary's CLUSTER_SPEC address. Raises RendezvousError when it cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            cluster.primary_host, cluster.primary_port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as exc:
        raise RendezvousError(f"the primary's own name {cluster.primary_host!r} is not known: {exc}") from exc
    listener = socket.socket(family)
    # A restarted container finds its predecessor's connections in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    local = str(address[0])
    try:
        listener.bind(address)
    except OSError as exc:
        if exc.errno != errno.EADDRNOTAVAIL:
            listener.close()
            raise RendezvousError(f"cannot listen on {local}:{cluster.primary_port}: {exc}") from exc
        # The name stands for a service address in front of this container.
        logger.info("%s is not an address of this container; listening on all of its addresses", local)
        listener.bind(("", cluster.primary_port))
        local = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    listener.listen(socket.SOMAXCONN)
    return Listener(listener, local, listener.getsockname()[1])


def reserved_port(host: str) -> socket.socket:
    """A socket that keeps a free port of `host` from being given to anybody who asks for any port.

    It never listens, and SO_REUSEADDR lets a server that names the port (libuv's, hence TCPStore's, set the same)
    listen on it meanwhile.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class Rendezvous:
    """One launcher's side of the store. Methods are for one thread and raise RendezvousError when the store is lost.

    No method blocks but `host`, `connect` and the loops that name a timeout.
    """

    def __init__(self, store: TCPStore, cluster: Cluster) -> None:
        self._store = store
        self._cluster = cluster
        self._others = [node for node in range(cluster.num_nodes) if node != cluster.node_rank]
        self._beats: dict[int, tuple[int, float]] = {}
        self._round = 0

    @classmethod
    def host(cls, listener: Listener, cluster: Cluster) -> Rendezvous:
        """Serve the store on the primary's socket, which the store then owns."""
        return cls(_open_store(listener.address, listener.port, listener.socket.detach()), cluster)

    @classmethod
    def connect(cls, cluster: Cluster, *, timeout_seconds: float, check: Callable[[], None]) -> Rendezvous:
        """Join as a worker; waits for a late primary. `check` is called between tries and may raise."""
        from torch.distributed import DistError  # first of all: 2 s in which the primary may come up

        address = (cluster.primary_host, cluster.primary_port)
        wait_for_listener(address, timeout_seconds, check)
        try:
            return cls(_open_store(*address, None), cluster)
        except DistError as exc:
            raise RendezvousError(f"{address[0]}:{address[1]} answers but serves no store: {exc}") from exc

    def agree(
        self,
        local_world_size: int,
        plan_of: Callable[[tuple[int, ...]], Plan] | None,
        *,
        timeout_seconds: float,
        check: Callable[[], None],
    ) -> Plan:
        """Wait for all nodes and return the first round's plan, which the primary makes of the nodes' numbers of ranks.

        `plan_of` is None on every other node; `check` as in `connect`.
        """
        me = self._cluster.node_rank
        self.beat()  # first: who has joined is listened to
        self._set(f"joined/{me}", str(local_world_size))
        needed = [f"joined/{node}" for node in self._others] if plan_of else ["plan"]
        deadline = time.monotonic() + timeout_seconds
        while missing := [key for key in needed if not self._has(key)]:
            check()
            if time.monotonic() > deadline:
                raise RendezvousError(f"after {timeout_seconds:.0f} s still without {', '.join(missing)}")
            time.sleep(_POLL_SECONDS)
        if plan_of:
            sizes = [int(self._get(f"joined/{node}")) for node in range(self._cluster.num_nodes)]
            self.publish_plan(plan_of(tuple(sizes)))
        return self._plan()

    def publish_plan(self, plan: Plan) -> None:
        """Let every launcher find the plan of a round, this one or the next."""
        self._call(lambda: self._store.set(f"launch/{plan.restart}/plan", canonical_json(plan)))

    def next_round(self) -> Plan:
        """The plan of the next round, of which every method speaks from now on. It has been published; see Verdict."""
        self._round += 1
        return self._plan()

    def beat(self) -> None:
        """Say that this launcher lives."""
        self._call(lambda: self._store.add(f"launch/beat/{self._cluster.node_rank}", 1))

    def silent_nodes(self, silence_seconds: float) -> list[int]:
        """Nodes whose launchers have not beaten for so long, as seen from here since the first call."""
        keys = [f"launch/beat/{node}" for node in self._others]
        counts = self._call(lambda: self._store.multi_get(keys)) if keys else []
        now = time.monotonic()
        for node, count in zip(self._others, map(int, counts), strict=True):
            if self._beats.get(node, (-1, 0.0))[0] != count:
                self._beats[node] = (count, now)
        return [node for node, (_, since) in self._beats.items() if now - since > silence_seconds]

    def tell_failure(self) -> None:
        """Let every launcher know that this round cannot go on."""
        self._set("failure", "1")

    def failure_told(self) -> bool:
        """Whether any launcher has told a failure."""
        return self._has("failure")

    def tell_end(self, end: NodeEnd) -> None:
        """Publish how this node's ranks ended."""
        self._set(f"ends/{self._cluster.node_rank}", canonical_json(end))

    def told_ends(self) -> dict[int, NodeEnd]:
        """What the other nodes have told so far, by node rank."""
        told = [node for node in self._others if self._has(f"ends/{node}")]
        return {node: from_dict(NodeEnd, json.loads(self._get(f"ends/{node}"))) for node in told}

    def publish_verdict(self, verdict: Verdict, *, timeout_seconds: float, absent: Sequence[int]) -> None:
        """Tell the verdict and, if it is the last, wait until the nodes that are there have read it.

        For the store ends with us.
        """
        self._set("verdict", canonical_json(verdict))
        present = [node for node in self._others if node not in absent and not verdict.restart]
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not all(self._has(f"read/{node}") for node in present):
            time.sleep(_POLL_SECONDS)

    def verdict(self) -> Verdict | None:
        """The primary's verdict, once there is one; reading it is told to the primary."""
        if not self._has("verdict"):
            return None
        verdict = from_dict(Verdict, json.loads(self._get("verdict")))
        self._set(f"read/{self._cluster.node_rank}", "1")
        return verdict

    def _plan(self) -> Plan:
        return from_dict(Plan, json.loads(self._get("plan")))

    def _set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(f"launch/{self._round}/{key}", value))

    def _get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(f"launch/{self._round}/{key}"))

    def _has(self, key: str) -> bool:
        return self._call(lambda: self._store.check([f"launch/{self._round}/{key}"]))

    def _call(self, call: Callable[[], T]) -> T:
        from torch.distributed import DistError

        try:
            return call()
        except DistError as exc:
            raise RendezvousError(f"lost the store of the primary's launcher: {exc}") from exc


def _open_store(host: str, port: int, listen_fd: int | None) -> TCPStore:
    """The store's server, on a socket that it then owns, or without one a client of it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but re-exported without __all__

    store: TCPStore = TCPStore(
        host,
        port,
        is_master=listen_fd is not None,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
        use_libuv=listen_fd is None,  # torch 2.4 refuses a bound socket for its libuv server
        timeout=_SERVE_TIMEOUT,
    )
    store.set_timeout(_CALL_TIMEOUT)
    return store


def wait_for_listener(address: tuple[str, int], timeout_seconds: float, check: Callable[[], None]) -> None:
    """Block until something listens there. TCPStore can wait too, but prints a C++ stack at every try."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        check()
        try:
            socket.create_connection(address, timeout=5.0).close()
        except OSError as exc:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"the primary did not listen on {address[0]}:{address[1]} within {timeout_seconds:.0f} s: {exc}"
                ) from exc
            time.sleep(_POLL_SECONDS)
        else:
            return
