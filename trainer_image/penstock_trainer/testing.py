"""Ranks and nodes as real processes on loopback, for tests and benchmarks; nothing of it runs in a job.

`run_ranks` starts the ranks of one world without a launcher. `run_cluster` starts one launcher per node, each with the
CLUSTER_SPEC that Vertex would give it, on loopback addresses that no other cluster of this machine is likely to have.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from penstock_trainer.observe.structured_logs import readable
from penstock_trainer.rendezvous import reserved_port


@dataclass(frozen=True, slots=True)
class RankRun:
    """How one rank (`run_ranks`) or one node's launcher (`run_cluster`) ended."""

    rank: int
    """The node's rank where the process is a launcher."""
    returncode: int
    """-9 if the process had to be killed at the timeout."""
    stdout: str
    stderr: str
    """With log lines as on a terminal."""


class ChildProcess:
    """A child in its own session, its output kept in files so that it can never block on a full pipe.

    As a context manager it kills what is left of the session on exit.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        # What this process can import, the child can: a test finds its rank modules in pytest's pythonpath.
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self._process = subprocess.Popen(
            list(argv),
            env={**os.environ, **path, **env},
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What the child has written to stdout so far."""
        return _content(self._stdout)

    @property
    def stderr(self) -> str:
        """What the child has written to stderr so far, its log lines as on a terminal."""
        return readable(_content(self._stderr))

    def send_signal(self, number: int) -> None:
        """To the child alone, not to its session; nothing happens when it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int:
        """The child's return code. A child that is still there after the timeout is killed with its session: -9."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._process.wait()
        self._stdout.close()
        self._stderr.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_ranks(
    module: str,
    args: Sequence[str],
    *,
    world_size: int,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> list[RankRun]:
    """Run `python -m <module> <args>` once per rank of one node and wait for all; by rank.

    Ranks find each other by env:// on loopback. `env` is added to this process's environment and wins over what is
    set here. Ranks that are left after `timeout_seconds`, over all ranks, are killed.
    """
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1")).getsockname()[1]
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **_ONE_THREAD_ON_LOOPBACK,
        }
        ranks = [
            stack.enter_context(
                ChildProcess(
                    [sys.executable, "-m", module, *args],
                    {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
                )
            )
            for rank in range(world_size)
        ]
        return _wait_all(ranks, timeout_seconds)


def run_cluster(
    argv_per_node: Sequence[Sequence[str]],
    *,
    reducers: int = 0,
    port: int = 2222,
    open_ports: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> list[RankRun]:
    """Run one launcher command per node, each with its CLUSTER_SPEC, and wait for all; by node rank.

    `reducers` is the size of worker pool 2, which is named in the specs and not started. Nodes that are left after
    `timeout_seconds`, over all nodes, are killed.
    """
    environs = cluster_environs(len(argv_per_node), reducers=reducers, port=port, open_ports=open_ports)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(ChildProcess(argv, {**environ, **(env or {})}))
            for argv, environ in zip(argv_per_node, environs, strict=True)
        ]
        return _wait_all(nodes, timeout_seconds)


def cluster_environs(
    num_nodes: int, *, reducers: int = 0, port: int = 2222, open_ports: Sequence[int] = ()
) -> list[dict[str, str]]:
    """What Vertex sets on each node of a job, by node rank: CLUSTER_SPEC, and its RANK and WORLD_SIZE of nodes.

    CLUSTER_SPEC names `open_ports` when there are any. Each call takes another block of 127.0.0.0/8, so clusters on the same port do not meet.
    """
    block = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}"
    hosts = [f"{block}.{index + 1}:{port}" for index in range(num_nodes + reducers)]
    pools = {
        "workerpool0": hosts[:1],
        "workerpool1": hosts[1:num_nodes],
        "workerpool2": hosts[num_nodes:],
    }
    cluster = {name: replicas for name, replicas in pools.items() if replicas}
    environs = []
    for node_rank in range(num_nodes):
        pool, index = ("workerpool0", 0) if node_rank == 0 else ("workerpool1", node_rank - 1)
        spec: dict[str, object] = {
            "cluster": cluster,
            "environment": "cloud",
            "task": {"type": pool, "index": index},
        }
        if open_ports:
            spec["open_ports"] = list(open_ports)
        vertex = {
            "CLUSTER_SPEC": json.dumps(spec),
            "RANK": str(node_rank),
            "WORLD_SIZE": str(num_nodes),
            "MASTER_ADDR": f"{block}.1",
            "MASTER_PORT": "3333",
        }
        environs.append({**vertex, **_ONE_THREAD_ON_LOOPBACK})
    return environs


_ONE_THREAD_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def _wait_all(processes: Sequence[ChildProcess], timeout_seconds: float) -> list[RankRun]:
    deadline = time.monotonic() + timeout_seconds
    returncodes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    return [
        RankRun(rank, returncode, process.stdout, process.stderr)
        for rank, (process, returncode) in enumerate(zip(processes, returncodes, strict=True))
    ]


def _content(file: IO[bytes]) -> str:
    # pread leaves the offset alone, which the child shares and writes at.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
