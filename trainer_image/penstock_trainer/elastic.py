"""A job whose number of nodes may change while it runs: torchrun's c10d rendezvous in place of our launchers' own.

    python -m penstock_trainer launch --nodes=MIN:MAX [--processes-per-node=N] [--max-restarts=N] -- COMMAND ...

Runs on every node, as `launch` without `--nodes` does. The job begins when MIN nodes have come and no other has for a
while, goes on with those that are left when one is lost, and takes in nodes up to MAX that come late or come back; each
change ends all ranks by SIGTERM and starts COMMAND again in the new world, so COMMAND has to go on from its own
checkpoints at any world size. `COMMAND` may be `python -m penstock_trainer.rank --config=...`: our checkpoints are cut
anew for the ranks that read them. The node of workerpool0 holds the rendezvous; without it nothing goes on.

Each node runs torch.distributed.run's agent in a process of its own, with

- TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. By default the workers of torch 2.13 share the agent's store over all restarts
  and read there the addresses of dead ranks: 6 of 9 restarts after a killed rank failed or hung, and none of 5 with the
  variable. A prefix made of TORCHELASTIC_RESTART_COUNT is no way out here, because a change of nodes does not count.
- workers that the kernel ends with their agent (die_with_parent). torchrun's own outlive a killed agent, train on, and
  leave the other nodes waiting at the end.
- is_host told, not guessed from names: the agents of one machine would all take a loopback address for their own.

Exit codes: 0 when the ranks of this node ended with 0; 134 when the first of them to fail died by a signal or exited
with 134 itself, when this launcher was told to stop, and when the agent failed (the rendezvous was lost, say); 1
otherwise. More cannot be known: torchrun's agents do not tell each other why a rank failed. So a script's rank that ends
with a traceback because a rank of another node was killed makes 1 on its own node, where the launchers of `launch`
would say 134 on both; that is, once `--max-restarts`, which every agent counts for itself, are used up. A node whose
ranks are done while another's failed in their last moments waits five minutes for it, and then says 0.

On Vertex the job needs restart_job_on_worker_restart=False, else the platform starts all nodes again when one is lost.

MPI is not offered: torch's wheels are built without it, and neither gloo nor NCCL needs it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from penstock_trainer.cluster import Cluster
from penstock_trainer.launch import LaunchError, require_runnable, visible_accelerators
from penstock_trainer.outcome import RETRYABLE, Outcome, RankEnd
from penstock_trainer.ranks import Ranks
from penstock_trainer.rendezvous import wait_for_listener
from penstock_trainer.watch import Signals, Timing

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

logger = logging.getLogger("penstock_trainer.elastic")  # also when run as __main__

_SHIM = str(Path(__file__).with_name("die_with_parent.py"))


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a job runs on, from the fewest to the most."""

    fewest: int
    most: int

    @classmethod
    def parse(cls, text: str, *, num_nodes: int) -> Self:
        """MIN:MAX of a job that has `num_nodes` machines. Raises LaunchError.

        MAX is all of them: torchrun's agent on a spare node ends with an AttributeError when the others are done, and
        its exit code would fail the job.
        """
        low, _, high = text.partition(":")
        if low.isdecimal() and 1 <= int(low) <= num_nodes and high == str(num_nodes):
            return cls(int(low), num_nodes)
        raise LaunchError(
            f"--nodes={text} is not valid: it must be MIN:{num_nodes} with MIN from 1 to {num_nodes}, the replicas of "
            "worker pools 0 and 1 in CLUSTER_SPEC (one without it)."
        )


def launch_elastic(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    nodes: str,
    processes_per_node: int | None = None,
    max_restarts: int = 3,
    timing: Timing | None = None,
    last_call_seconds: int = 30,
) -> int:
    """Run this node's part of the job and return its exit code. Blocks until its ranks have ended for good.

    `nodes` is MIN:MAX. `last_call_seconds` is how long MIN nodes wait for more before they begin. Of `timing`, the
    waits of the rendezvous are taken in whole seconds. Raises ClusterError or LaunchError before any process starts,
    and RendezvousError when the primary does not come up or a signal comes first.
    """
    cluster, timing = Cluster.from_environ(environ), timing or Timing()
    node_range = NodeRange.parse(nodes, num_nodes=cluster.num_nodes)
    require_runnable(command, environ, processes_per_node=processes_per_node, max_restarts=max_restarts)
    local_world_size = processes_per_node or visible_accelerators() or 1
    options = [
        f"--nnodes={node_range.fewest}:{node_range.most}",
        f"--nproc-per-node={local_world_size}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.primary_host}:{cluster.primary_port}",
        f"--rdzv-id={environ.get('CLOUD_ML_JOB_ID', 'penstock')}",
        f"--rdzv-conf={_rendezvous_options(cluster, timing, last_call_seconds)}",
        f"--shutdown-timeout={math.ceil(timing.save_seconds)}",
    ]
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        if not cluster.is_primary:  # an agent waits for the store a minute only
            address = (cluster.primary_host, cluster.primary_port)
            wait_for_listener(address, timing.join_seconds, signals.check)
        options.append(f"--local-addr={_local_address(cluster)}")
        result_file = Path(directory) / "agent.json"
        argv = [sys.executable, "-m", "penstock_trainer.elastic", *options, "--", *command]
        with Ranks(signals.queue) as agent:
            agent.start(0, argv, _agent_environ(environ, local_world_size, result_file), result_file)
            exit_code = _follow(agent, signals, timing)
    return exit_code


def _rendezvous_options(cluster: Cluster, timing: Timing, last_call_seconds: int) -> str:
    """--rdzv-conf. A node counts as lost after `timing.silence_seconds`; torchrun's default is 15 s."""
    beat_seconds = max(1, round(timing.beat_seconds))
    told = {
        "is_host": int(cluster.is_primary),
        "join_timeout": math.ceil(timing.join_seconds),
        "last_call_timeout": last_call_seconds,
        "keep_alive_interval": beat_seconds,
        "keep_alive_max_attempt": max(1, round(timing.silence_seconds / beat_seconds)),
    }
    return ",".join(f"{name}={value}" for name, value in told.items())


def _local_address(cluster: Cluster) -> str:
    """Where other nodes reach this one: torchrun's rank 0, which hosts the ranks' store, may be on any node.

    Of the primary it is the name that they know; of another node, the address from which it reaches the primary.
    """
    if cluster.is_primary:
        return cluster.primary_host
    family, kind, _, _, address = socket.getaddrinfo(
        cluster.primary_host, cluster.primary_port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def _agent_environ(environ: Mapping[str, str], local_world_size: int, result_file: Path) -> dict[str, str]:
    inherited = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    # Torch takes every core in each process; torchrun would give each rank one.
    threads = str(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return {
        **({"OMP_NUM_THREADS": threads} if local_world_size > 1 else {}),
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PENSTOCK_RESULT_FILE": str(result_file),
    }


def _follow(agent: Ranks, signals: Signals, timing: Timing) -> int:
    """The node's exit code, once its agent has ended. Forwards signals; the agent passes them on to its ranks."""
    told_to_stop, kill_at = False, math.inf
    while True:
        with suppress(queue.Empty):
            event = signals.queue.get(timeout=timing.poll_seconds)
            if isinstance(event, RankEnd):
                return _exit_code(event, told_to_stop=told_to_stop)
            logger.info("%s: ranks have %.0f s to save", signal.Signals(event).name, timing.save_seconds)
            told_to_stop = True
            agent.signal(signal.SIGTERM)
            kill_at = min(kill_at, time.monotonic() + timing.save_seconds + timing.farewell_seconds)
        if time.monotonic() > kill_at:  # an agent that waits for the others at the end ignores SIGTERM
            agent.kill()


def _exit_code(end: RankEnd, *, told_to_stop: bool) -> int:
    if end.outcome == "done":
        logger.info("exit code 0: all ranks of this node are done")
        return 0
    exit_code = RETRYABLE if told_to_stop or end.outcome != "failed" else 1
    logger.error("exit code %d: %s", exit_code, end.error)
    return exit_code


def run_agent(options: Sequence[str], command: Sequence[str]) -> tuple[Outcome, str]:
    """Be torchrun's agent of this node; how that ended, and why. Main thread only; blocks.

    `options` are torchrun's. The command does not go through its parser, which takes options of the script that begin
    like its own for ambiguous.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    args = parse_args([*options, "--no-python", sys.executable])  # type: ignore[no-untyped-call]
    args.training_script_args = ["-I", "-S", _SHIM, str(os.getpid()), *command]
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as exc:
        return first_cause(exc.failures)
    except SignalException as exc:
        return "retryable", f"told to stop by {signal.Signals(exc.sigval).name}"
    except Exception as exc:
        logger.exception("torchrun's agent failed")
        return "retryable", f"torchrun's agent failed: {type(exc).__name__}: {exc}".splitlines()[0]
    return "done", ""


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[Outcome, str]:
    """What the failed ranks of a node, by global rank, say of the job: whether another try can help, and why.

    Only those count that failed in the first second, the resolution of torchrun's clock: the others were ended by the
    agent. One that died by a signal goes before one that exited, which may have noticed its lost peer; SIGTERM is what
    the agent sends.
    """
    first = min(failure.timestamp for failure in failures.values())
    early = {rank: failure for rank, failure in failures.items() if failure.timestamp == first}
    for rank, failure in early.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            number = -failure.exitcode
            return "retryable", f"rank {rank} died by signal {number} ({signal.strsignal(number)})"
    rank, failure = next(iter(early.items()))
    outcome: Outcome = "failed" if failure.exitcode not in (RETRYABLE, -signal.SIGTERM) else "retryable"
    return outcome, f"rank {rank} ended with exit code {failure.exitcode}"


def main(argv: Sequence[str]) -> int:
    """The agent's process: torchrun's options, `--`, the command. Tells its launcher how it ended."""
    split = list(argv).index("--")
    result_file = Path(os.environ.pop("PENSTOCK_RESULT_FILE"))  # not for the ranks, which report to torchrun
    outcome, error = run_agent(argv[:split], argv[split + 1 :])
    result_file.write_text(json.dumps({"outcome": outcome, "error": error}))
    return {"done": 0, "failed": 1}.get(outcome, RETRYABLE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
