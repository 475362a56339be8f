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

Restarts. When a rank is lost while every node's launcher lives, the launchers end what is left of their ranks and start
all of them again, `max_restarts` times over the job: a crash costs seconds instead of new machines. Nothing of a round
reaches the next, because gloo and NCCL take the addresses of dead peers for theirs: our trainer's ranks get a new
attempt, whose name is the prefix of their keys in the launchers' store, and a script gets another MASTER_PORT, where its
rank 0 opens a new store. Not restarted in place: a failure that our trainer reported itself, a job that was told to
stop, and one that lost a node.

Hangs. The ranks of our trainer beat (see heartbeat). One that is silent for longer than its collectives may take writes
its tracebacks and is killed; then it is a lost rank like any other. Nothing is known of a script, so it may be silent
for as long as it likes.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from penstock_trainer.checkpoints.ownership import check_ownership, take_ownership
from penstock_trainer.cluster import Cluster
from penstock_trainer.contract.checkpoint import Owner
from penstock_trainer.contract.config import JobConfig, parse_args
from penstock_trainer.outcome import RankEnd, Verdict, mends_in_place
from penstock_trainer.ranks import Ranks
from penstock_trainer.rendezvous import Listener, Plan, Rendezvous, listen, reserved_port
from penstock_trainer.script_checkpoints import ScriptCheckpoints, SyncLoop
from penstock_trainer.storage import storage_for
from penstock_trainer.watch import Signals, Timing, Watch

logger = logging.getLogger(__name__)

_AFTER_COLLECTIVES_SECONDS = 30.0
"""Between the timeout of the ranks' collectives and taking a silent rank for hung."""
_MEMORY = Path("/dev/shm")  # noqa: S108  # a directory of its own is made in it
"""Where files are memory only: a heartbeat that had to wait for a disk would hold a step up."""


class LaunchError(Exception):
    """The job cannot be started as it was asked for; another try would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks run, and what the primary decides for it."""

    argv: tuple[str, ...]
    local_world_size: int
    reports: bool
    """Whether ranks write PENSTOCK_RESULT_FILE, and beat in PENSTOCK_HEARTBEAT_FILE."""
    max_restarts: int
    """The primary's counts, for all nodes."""
    mint: Callable[[Listener, int], Mapping[str, str]]
    """Called on the primary with the number of rounds before: environment that all ranks of the round share. Raises as
    `watch.Replan` does."""
    sync: Callable[[], SyncLoop] | None = None
    """What keeps the ranks' checkpoint directory in storage during one round, not yet started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDir:
    """Where a script keeps its checkpoints on each node, and where they are copied to."""

    path: Path
    uri: str = ""
    """Empty: AIP_CHECKPOINT_DIR."""
    sync_seconds: float = 60.0
    """Between two syncs."""


def launch_trainer(
    args: Sequence[str],
    environ: Mapping[str, str],
    *,
    rank_module: str = "penstock_trainer.rank",
    timing: Timing | None = None,
) -> int:
    """Run our trainer on this node and return the exit code. Blocks until every node's ranks have ended.

    Raises ContractError or ClusterError before any process starts, StorageError when the checkpoint root cannot be
    taken, and RendezvousError when the nodes do not come together.
    """
    config = parse_args(args)
    cluster = Cluster.from_environ(environ)
    root_uri = config.checkpoint.root_uri(environ.get("AIP_CHECKPOINT_DIR", ""))

    owner: Owner | None = None

    def mint(listener: Listener, _restart: int) -> Mapping[str, str]:
        nonlocal owner
        storage = storage_for(root_uri)
        if owner is not None:  # a job that was replaced meanwhile must not take the root back
            check_ownership(root_uri, owner, storage)
        owner = take_ownership(root_uri, storage)
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
        max_restarts=config.max_restarts,
        mint=mint,
    )
    return _launch(program, cluster, environ, timing or trainer_timing(config))


def trainer_timing(config: JobConfig) -> Timing:
    """What the ranks of a run are given: time to save, and to fail by their own collectives' timeouts, which say more."""
    return Timing(
        save_seconds=config.checkpoint.preemption_seconds,
        hung_seconds=config.engine.timeout_seconds + _AFTER_COLLECTIVES_SECONDS,
    )


def launch_script(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    max_restarts: int = 3,
    checkpoint_dir: CheckpointDir | None = None,
    timing: Timing | None = None,
) -> int:
    """Run anybody's command once per accelerator of this node (else once) and return the exit code. Blocks.

    Rank 0 opens its own store on MASTER_PORT. Each round takes the next of CLUSTER_SPEC's open_ports; when all are used,
    a port of the primary that was free when the round was planned and is no earlier round's: each is held, bound and
    not listening, until the job ends. A port that served a round has that round's connections in TIME_WAIT, over which
    TCPStore would bind (libuv sets SO_REUSEADDR) but other servers need not, and a helper that left its rank's process
    group may still listen there; hence another port each time. That a port outside open_ports is reachable from the
    other nodes is no new demand: gloo and NCCL connect on ports that the system chooses.

    The script is told the number of rounds before as PENSTOCK_RESTART and, for scripts written for torchrun, as
    TORCHELASTIC_RESTART_COUNT; no code of env:// reads either.

    With `checkpoint_dir`, each node restores its directory before the first round when it is empty or missing, copies it
    to storage while ranks run, and once more when those of a round have ended; see script_checkpoints. A job whose last
    copy fails ends with 134. Raises ClusterError, LaunchError or RendezvousError; StorageError or ContractError when
    the directory's copy cannot be read.
    """
    cluster = Cluster.from_environ(environ)
    require_runnable(command, environ, processes_per_node=processes_per_node, max_restarts=max_restarts)
    sync = _opened(checkpoint_dir, cluster, environ) if checkpoint_dir else None
    with ExitStack() as stack:

        def mint(listener: Listener, restart: int) -> Mapping[str, str]:
            ports = [port for port in dict.fromkeys(cluster.open_ports) if port != listener.port]
            if restart < len(ports):
                port = ports[restart]
            else:
                port = stack.enter_context(reserved_port(listener.address)).getsockname()[1]
            return {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(restart)}

        program = Program(
            argv=tuple(command),
            local_world_size=processes_per_node or visible_accelerators() or 1,
            reports=False,
            max_restarts=max_restarts,
            mint=mint,
            sync=sync,
        )
        return _launch(program, cluster, environ, timing or Timing())


def require_runnable(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    processes_per_node: int | None,
    max_restarts: int,
) -> None:
    """Raise LaunchError for a command or for numbers that cannot be run."""
    if not command:
        raise LaunchError("there is no command to launch; give it after --, as in: launch -- python train.py")
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise LaunchError(f"{command[0]!r} is not a program on PATH; give its path.")
    if processes_per_node is not None and processes_per_node < 1:
        raise LaunchError(f"--processes-per-node={processes_per_node} is not valid: it must be at least 1.")
    if max_restarts < 0:
        raise LaunchError(f"--max-restarts={max_restarts} is not valid: it must be 0 or more.")


def _opened(
    checkpoint_dir: CheckpointDir, cluster: Cluster, environ: Mapping[str, str]
) -> Callable[[], SyncLoop]:
    """Program.sync for a directory that this node has taken over and restored."""
    uri = checkpoint_dir.uri or environ.get("AIP_CHECKPOINT_DIR", "")
    if not uri:
        raise LaunchError(
            f"--checkpoint-dir={checkpoint_dir.path} has nowhere to be copied to. Give --checkpoint-uri=gs://BUCKET/DIR, "
            "or set base_output_directory on the job (Vertex then sets AIP_CHECKPOINT_DIR)."
        )
    if checkpoint_dir.sync_seconds <= 0:
        raise LaunchError(f"--sync-seconds={checkpoint_dir.sync_seconds} is not valid: it must be above 0.")
    checkpoints = ScriptCheckpoints(checkpoint_dir.path.absolute(), uri, cluster.node_rank)
    try:
        checkpoints.open()
    except OSError as exc:
        raise LaunchError(f"--checkpoint-dir={checkpoint_dir.path} cannot be restored: {exc}") from exc
    return partial(SyncLoop, checkpoints, checkpoint_dir.sync_seconds)


def visible_accelerators() -> int:
    """CUDA devices that a rank would see. Asks torch only where there is a device node, to start fast where not."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def _launch(program: Program, cluster: Cluster, environ: Mapping[str, str], timing: Timing) -> int:
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        listener, plan_of = None, None
        if cluster.is_primary:
            listener = listen(cluster)
            stack.enter_context(listener.socket)
            plan_of = _planner(program, listener)
        master = listener.address if listener else cluster.primary_host
        node = stack.enter_context(_Node(program, cluster, {**environ, "MASTER_ADDR": master}, signals))
        if cluster.num_nodes == 1 and plan_of:
            node.start(plan_of((program.local_world_size,)))
        if listener:
            rendezvous = Rendezvous.host(listener, cluster)
        else:
            rendezvous = Rendezvous.connect(cluster, timeout_seconds=timing.join_seconds, check=signals.check)
        if cluster.num_nodes > 1:
            node.start(
                rendezvous.agree(
                    program.local_world_size,
                    plan_of,
                    timeout_seconds=timing.join_seconds,
                    check=signals.check,
                )
            )
        verdict = node.follow(rendezvous, timing, listener)
        log = logger.info if verdict.exit_code == 0 else logger.error
        log("exit code %d: %s", verdict.exit_code, verdict.reason)
        return verdict.exit_code


def _planner(program: Program, listener: Listener) -> Callable[[tuple[int, ...]], Plan]:
    """The first round's plan for the nodes' numbers of ranks. What it needs of storage is done at once."""
    env = program.mint(listener, 0)
    return lambda sizes: Plan(local_world_sizes=sizes, env=env, max_restarts=program.max_restarts)


def _replan(program: Program, listener: Listener, plan: Plan, ends: Sequence[RankEnd]) -> Plan | None:
    """A Replan for the round of `plan`."""
    if plan.restart == plan.max_restarts or not mends_in_place(ends, reports=program.reports):
        return None
    restart = plan.restart + 1
    return replace(plan, restart=restart, env=program.mint(listener, restart))


class _Node:
    """This node's ranks over all rounds. As a context manager it ends, on exit, those that are left."""

    def __init__(
        self, program: Program, cluster: Cluster, environ: Mapping[str, str], signals: Signals
    ) -> None:
        self._program = program
        self._cluster = cluster
        self._environ = environ
        self._signals = signals
        self._round = ExitStack()

    def start(self, plan: Plan) -> None:
        """Start the ranks of a round, and end what is left of those before."""
        self._round.close()
        self._plan = plan
        reports, beats = self._directory(), self._directory(_MEMORY if os.access(_MEMORY, os.W_OK) else None)
        self._ranks = self._round.enter_context(Ranks(self._signals.queue))
        _start_ranks(self._ranks, self._program, plan, self._cluster, self._environ, reports, beats)
        self._sync = self._program.sync() if self._program.sync else None
        if self._sync:
            self._sync.start()

    def follow(self, rendezvous: Rendezvous, timing: Timing, listener: Listener | None) -> Verdict:
        """The verdict of the last round, after as many restarts as it takes. `listener` is the primary's. Blocks."""
        while True:
            replan = partial(_replan, self._program, listener, self._plan) if listener else None
            watch = Watch(self._ranks, rendezvous, self._cluster, timing, replan=replan, sync=self._sync)
            verdict = watch.run(self._signals.queue)
            if not verdict.restart:
                return verdict
            plan = rendezvous.next_round()
            cause = verdict.reason.splitlines()[0]
            logger.warning("restart %d of %d: %s", plan.restart, plan.max_restarts, cause)
            self._signals.repeat()
            self.start(plan)

    def _directory(self, parent: Path | None = None) -> Path:
        """That lives as long as the round."""
        made = tempfile.TemporaryDirectory(prefix="penstock-", dir=parent)
        return Path(self._round.enter_context(made))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._round.close()


def _start_ranks(
    ranks: Ranks,
    program: Program,
    plan: Plan,
    cluster: Cluster,
    environ: Mapping[str, str],
    reports: Path,
    beats: Path,
) -> None:
    """`reports` and `beats` are empty directories for the files of ranks that report."""
    # A script's own env:// must not take us for torchrun, whatever this process inherited.
    inherited = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    first = plan.first_rank(cluster.node_rank)
    num_ranks = program.local_world_size
    # Torch takes every core in each process; ranks that share them would slow each other down manyfold.
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    shared = {"OMP_NUM_THREADS": threads} if num_ranks > 1 else {}
    for local_rank in range(num_ranks):
        rank = first + local_rank
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
            "PENSTOCK_RESTART": str(plan.restart),
        }
        result_file = heartbeat_file = None
        if program.reports:
            result_file, heartbeat_file = reports / f"rank-{rank}.json", beats / f"rank-{rank}"
            env["PENSTOCK_RESULT_FILE"] = str(result_file)
            env["PENSTOCK_HEARTBEAT_FILE"] = str(heartbeat_file)
        ranks.start(rank, program.argv, env, result_file, heartbeat_file)
    logger.info(
        "node %d of %d (%s) started ranks %d to %d of %d",
        cluster.node_rank,
        cluster.num_nodes,
        cluster.pool,
        first,
        first + num_ranks - 1,
        plan.world_size,
    )
