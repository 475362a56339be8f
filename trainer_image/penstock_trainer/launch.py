"""The node launcher: starts this node's ranks, watches them, and ends with the exit code of the job.

Run as `python -m penstock_trainer` (our trainer) or `python -m penstock_trainer launch -- <command>` (any script that
initialises torch.distributed by env://).

What is started when. TCPStore needs torch, and importing torch takes 1.7 CPU seconds (measured, warm cache). On one
node nothing has to be agreed, so the ranks start first and import torch while the launcher does; their connections
queue at the socket that is bound already (two ranks from start to end: 2.8 s on two cores, torchrun 3.1 s). On several
nodes the launchers import torch, meet, and then start the ranks, because a rank that started earlier would run into its
own timeouts while a node is minutes late. Holding early ranks at a gate would save those seconds only where cores are
idle, and launchers without torch would need a second protocol beside TCPStore: not worth it next to minutes of
provisioning.

Seams: a restart in place would call `_start_ranks` and `_Watch` again on a fresh Rendezvous; syncing a foreign
script's checkpoints would run beside `_Watch`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from penstock_trainer.cluster import Cluster
from penstock_trainer.contract.config import parse_args
from penstock_trainer.outcome import RankEnd, Verdict, decide
from penstock_trainer.ownership import take_ownership
from penstock_trainer.ranks import Ranks
from penstock_trainer.rendezvous import Listener, Plan, Rendezvous, RendezvousError, listen, reserved_port
from penstock_trainer.storage import storage_for

logger = logging.getLogger(__name__)

Events = queue.SimpleQueue[RankEnd | int]
"""Ends of ranks, and signal numbers. SimpleQueue.put is reentrant, hence allowed in a signal handler."""


class LaunchError(Exception):
    """The job cannot be started as it was asked for; another try would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long the launcher waits for what."""

    join_seconds: float = 900.0
    """For all nodes to come up: they start minutes apart, and each may have to pull an image of 10 GB."""
    save_seconds: float = 25.0
    """Between a forwarded SIGTERM and SIGKILL. A Spot VM is gone 30 s after its notice."""
    peer_seconds: float = 10.0
    """Between the bad end of one rank and SIGKILL for the others: long enough to notice a broken connection and to
    report it, far shorter than a collective's timeout."""
    beat_seconds: float = 5.0
    """Between two signs of life of a launcher."""
    silence_seconds: float = 60.0
    """Without a sign of life after which a node is given up: 12 missed ones, or a live migration's pause."""
    farewell_seconds: float = 5.0
    """For the other launchers to read the verdict before the primary takes the store away."""
    poll_seconds: float = 1.0
    """Between two looks at the store while ranks run; ten times as often when they have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks run, and what the primary decides for it."""

    argv: tuple[str, ...]
    local_world_size: int
    reports: bool
    """Whether ranks write PENSTOCK_RESULT_FILE."""
    mint: Callable[[Listener], Mapping[str, str]]
    """Called once, on the primary: environment that all ranks of the job share."""


def launch_trainer(
    args: Sequence[str],
    environ: Mapping[str, str],
    *,
    rank_module: str = "penstock_trainer.trainer",
    timing: Timing | None = None,
) -> int:
    """Run our trainer on this node and return the exit code. Blocks until every node's ranks have ended.

    Raises ContractError or ClusterError before any process starts, StorageError when the checkpoint root cannot be
    taken, and RendezvousError when the nodes do not come together.
    """
    config = parse_args(args)
    cluster = Cluster.from_environ(environ)
    root_uri = config.checkpoint.root_uri(environ.get("AIP_CHECKPOINT_DIR", ""))

    def mint(listener: Listener) -> Mapping[str, str]:
        owner = take_ownership(root_uri, storage_for(root_uri))
        logger.info("attempt %s owns %s (fencing token %d)", owner.attempt, root_uri, owner.fencing_token)
        return {
            "PENSTOCK_ATTEMPT": owner.attempt,
            "PENSTOCK_FENCING_TOKEN": str(owner.fencing_token),
            "MASTER_PORT": str(listener.port),
            # env:// then joins the launcher's store as a client instead of opening one on the same port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    program = Program(
        argv=(sys.executable, "-m", rank_module, *args),
        local_world_size=visible_accelerators() or config.processes_per_node,
        reports=True,
        mint=mint,
    )
    return _launch(program, cluster, environ, timing or Timing())


def launch_script(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    timing: Timing | None = None,
) -> int:
    """Run anybody's command once per accelerator of this node (else once) and return the exit code. Blocks.

    Rank 0 opens its own store on MASTER_PORT: the first of CLUSTER_SPEC's open_ports, else a free port of the primary.
    Raises ClusterError, LaunchError or RendezvousError.
    """
    cluster = Cluster.from_environ(environ)
    if not command:
        raise LaunchError("there is no command to launch; give it after --, as in: launch -- python train.py")
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise LaunchError(f"{command[0]!r} is not a program on PATH; give its path.")
    if processes_per_node is not None and processes_per_node < 1:
        raise LaunchError(f"--processes-per-node={processes_per_node} is not valid: it must be at least 1.")
    with ExitStack() as stack:

        def mint(listener: Listener) -> Mapping[str, str]:
            if cluster.open_ports:
                return {"MASTER_PORT": str(cluster.open_ports[0])}
            held = stack.enter_context(reserved_port(listener.address))
            return {"MASTER_PORT": str(held.getsockname()[1])}

        program = Program(
            argv=tuple(command),
            local_world_size=processes_per_node or visible_accelerators() or 1,
            reports=False,
            mint=mint,
        )
        return _launch(program, cluster, environ, timing or Timing())


def visible_accelerators() -> int:
    """CUDA devices that a rank would see. Asks torch only where there is a device node, to start fast where not."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def _launch(program: Program, cluster: Cluster, environ: Mapping[str, str], timing: Timing) -> int:
    with ExitStack() as stack:
        events = stack.enter_context(_Signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        ranks = stack.enter_context(Ranks(events.queue))
        listener, env = None, None
        if cluster.is_primary:
            listener = listen(cluster)
            stack.enter_context(listener.socket)
            env = program.mint(listener)
        master = listener.address if listener else cluster.primary_host

        def start(plan: Plan) -> None:
            _start_ranks(ranks, program, plan, cluster, {**environ, "MASTER_ADDR": master}, directory)

        if cluster.num_nodes == 1 and env is not None:
            start(Plan(local_world_sizes=(program.local_world_size,), env=env))
        if listener:
            rendezvous = Rendezvous.host(listener, cluster)
        else:
            rendezvous = Rendezvous.connect(cluster, timeout_seconds=timing.join_seconds, check=events.check)
        if cluster.num_nodes > 1:
            start(
                rendezvous.agree(
                    program.local_world_size, env, timeout_seconds=timing.join_seconds, check=events.check
                )
            )
        verdict = _Watch(ranks, rendezvous, cluster, timing).run(events.queue)
        log = logger.info if verdict.exit_code == 0 else logger.error
        log("exit code %d: %s", verdict.exit_code, verdict.reason)
        return verdict.exit_code


def _start_ranks(
    ranks: Ranks,
    program: Program,
    plan: Plan,
    cluster: Cluster,
    environ: Mapping[str, str],
    directory: Path,
) -> None:
    # A script's own env:// must not take us for torchrun, whatever this process inherited.
    inherited = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    first = plan.first_rank(cluster.node_rank)
    num_ranks = program.local_world_size
    # Torch takes every core in each process; ranks that share them would slow each other down manyfold.
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    shared = {"OMP_NUM_THREADS": threads} if num_ranks > 1 else {}
    for local_rank in range(num_ranks):
        rank = first + local_rank
        result_file = directory / f"rank-{rank}.json" if program.reports else None
        env = {
            **shared,
            # The last lines of a rank that is killed must not stay in its buffer.
            "PYTHONUNBUFFERED": "1",
            **inherited,
            **plan.env,
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": str(cluster.node_rank),
        }
        if result_file:
            env["PENSTOCK_RESULT_FILE"] = str(result_file)
        ranks.start(rank, program.argv, env, result_file)
    logger.info(
        "node %d of %d (%s) started ranks %d to %d of %d",
        cluster.node_rank,
        cluster.num_nodes,
        cluster.pool,
        first,
        first + num_ranks - 1,
        plan.world_size,
    )


class _Signals:
    """SIGTERM and SIGINT as events, while it is entered. Main thread only."""

    def __init__(self) -> None:
        self.queue: Events = queue.SimpleQueue()
        self._received: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def check(self) -> None:
        """Raise RendezvousError if a signal has come: before ranks have started there is nothing to save."""
        if self._received is not None:
            raise RendezvousError(f"{signal.Signals(self._received).name} before all nodes had joined")

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        self.queue.put(number)


class _Watch:
    """Follows the ranks of this node, and the other launchers, to the verdict."""

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous, cluster: Cluster, timing: Timing) -> None:
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._cluster = cluster
        self._timing = timing
        self._ends: list[RankEnd] = []
        self._silent: list[int] = []
        self._next_beat = 0.0
        self._failed = False
        self._told = False
        self._cut_off = False
        self._kill_at = math.inf
        """When ranks that are left are killed."""
        self._leave_at = math.inf
        """When this launcher no longer waits for the others."""

    def run(self, events: Events) -> Verdict:
        """Block until the job's verdict is known, here and to the nodes that are there."""
        while True:
            with suppress(queue.Empty):
                self._handle(events.get(timeout=self._timing.poll_seconds / (10 if self._ended else 1)))
            if time.monotonic() > self._kill_at:
                self._ranks.kill()
            verdict = self._alone() if self._cut_off else self._confer()
            if verdict is not None:
                return verdict

    def _handle(self, event: RankEnd | int) -> None:
        if isinstance(event, int):
            logger.info(
                "%s: ranks have %.0f s to save", signal.Signals(event).name, self._timing.save_seconds
            )
            # Ctrl-C asks for the same, and trainers know one signal for it.
            self._ranks.signal(signal.SIGTERM)
            self._hurry(self._timing.save_seconds)
            self._leave_at = self._kill_at + self._timing.farewell_seconds
            return
        self._ends.append(event)
        if event.outcome == "preempted":
            self._hurry(self._timing.save_seconds)
        elif event.outcome != "done":
            self._failed = True
            self._hurry(self._timing.peer_seconds)

    @property
    def _ended(self) -> bool:
        return len(self._ends) == len(self._ranks)

    def _hurry(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _confer(self) -> Verdict | None:
        """One exchange with the other launchers; without the store the job cannot go on."""
        try:
            self._beat()
            self._share_failure()
            if not self._ended:
                return None
            if not self._told:
                self._rendezvous.tell_ends(self._ends)
                self._told = True
            return self._gather() if self._cluster.is_primary else self._await_verdict()
        except RendezvousError as exc:
            logger.error("%s", exc)
            self._cut_off = True
            self._hurry(self._timing.peer_seconds)  # the ranks have a moment to notice it too
            return None

    def _alone(self) -> Verdict | None:
        return decide(self._ends, lost_nodes=[0]) if self._ended else None

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._timing.beat_seconds
        self._rendezvous.beat()
        if self._cluster.is_primary:
            self._silent = self._rendezvous.silent_nodes(self._timing.silence_seconds)

    def _share_failure(self) -> None:
        """A bad end anywhere ends the job everywhere: ranks that wait in a collective would not notice by themselves."""
        if self._rendezvous.failure_told():
            self._hurry(self._timing.peer_seconds)
        elif self._failed or self._silent:
            self._rendezvous.tell_failure()

    def _await_verdict(self) -> Verdict | None:
        verdict = self._rendezvous.verdict()
        if verdict is None and time.monotonic() > self._leave_at:
            return decide(self._ends, lost_nodes=[0])
        return verdict

    def _gather(self) -> Verdict | None:
        """The primary's verdict, once every node has told or is given up."""
        told = self._rendezvous.ends_by_node()
        missing = set(range(1, self._cluster.num_nodes)) - set(told)
        lost = sorted(missing if time.monotonic() > self._leave_at else missing & set(self._silent))
        if missing - set(lost):
            return None
        verdict = decide([*self._ends, *(end for ends in told.values() for end in ends)], lost)
        self._rendezvous.publish_verdict(verdict, timeout_seconds=self._timing.farewell_seconds, absent=lost)
        return verdict
