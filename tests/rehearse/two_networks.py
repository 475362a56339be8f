"""Two nodes in a network each, joined by a cable that can be pulled: `unshare -rn python two_networks.py DIRECTORY CONFIG STEP`.

Trains once undisturbed. Then the cable is pulled when STEP is logged. When the first launcher has ended, the other is ended, the
cable is put back, and the job is started again, as the service would. Prints what was seen as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

HOSTS = ("10.77.0.1", "10.77.0.2")
_PATIENCE_SECONDS = 280.0
_GRACE_SECONDS = 30.0


class Node:
    """A network namespace, held by a process that sleeps in it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "3600"])

    def inside(self, *command: str) -> list[str]:
        """The command in this node's network."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", *command]

    def await_network(self) -> None:
        """Until the holder has left our network."""
        ours = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self.holder.pid}/ns/net").readlink() == ours:
            time.sleep(0.01)

    def link(self, state: str) -> None:
        """Put the cable in ("up") or pull it ("down")."""
        subprocess.run(self.inside("ip", "link", "set", "eth0", state), check=True)


@contextmanager
def cabled() -> Iterator[Sequence[Node]]:
    """Two nodes that reach each other."""
    nodes = [Node(0), Node(1)]
    try:
        for node in nodes:
            node.await_network()
        subprocess.run(
            ["ip", "link", "add", "name", "left", "type", "veth", "peer", "name", "right"], check=True
        )
        for node, end in zip(nodes, ("left", "right"), strict=True):
            subprocess.run(
                ["ip", "link", "set", end, "netns", str(node.holder.pid), "name", "eth0"], check=True
            )
            subprocess.run(
                node.inside("ip", "addr", "add", f"{HOSTS[node.index]}/24", "dev", "eth0"), check=True
            )
            subprocess.run(node.inside("ip", "link", "set", "lo", "up"), check=True)
            node.link("up")
        yield nodes
    finally:
        for node in nodes:
            node.holder.kill()
            node.holder.wait()


def start(node: Node, root: str, config: str, output: IO[str]) -> subprocess.Popen[str]:
    """The launcher of one node."""
    pools = {f"workerpool{index}": [f"{host}:2222"] for index, host in enumerate(HOSTS)}
    spec = {"cluster": pools, "environment": "cloud", "task": {"type": f"workerpool{node.index}", "index": 0}}
    environment = {
        **os.environ,
        "CLUSTER_SPEC": json.dumps(spec),
        "AIP_CHECKPOINT_DIR": root,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    command = node.inside(sys.executable, "-m", "penstock_trainer", f"--config={config}")
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)


def run(nodes: Sequence[Node], directory: Path, name: str, config: str, pull_at: int = 0) -> dict[str, Any]:
    """Exit codes and outputs of both launchers; and seconds from the pulled cable to the first one's end."""
    root = (directory / name.partition("-")[0]).as_uri()
    logs = [directory / f"{name}-{node.index}.log" for node in nodes]
    with ExitStack() as stack:
        outputs = [stack.enter_context(log.open("w")) for log in logs]
        launchers = [start(node, root, config, out) for node, out in zip(nodes, outputs, strict=True)]
        pulled = time.monotonic()
        if pull_at:
            await_step(logs[0], pull_at)
            nodes[1].link("down")
            pulled = time.monotonic()
        await_first(launchers)
        seconds = time.monotonic() - pulled
        if pull_at:
            end_others(launchers)
        codes = [launcher.wait(_PATIENCE_SECONDS) for launcher in launchers]
    return {"codes": codes, "output": [log.read_text() for log in logs], "seconds": seconds}


def await_first(launchers: Sequence[subprocess.Popen[str]]) -> None:
    """Until one of them has ended."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while all(launcher.poll() is None for launcher in launchers):
        if time.monotonic() > deadline:
            raise SystemExit(f"no launcher has ended within {_PATIENCE_SECONDS:g} s")
        time.sleep(0.1)


def end_others(launchers: Sequence[subprocess.Popen[str]]) -> None:
    """SIGTERM, and SIGKILL after the grace, as the service does with what is left of a job that it starts again."""
    for launcher in launchers:
        launcher.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for launcher in launchers:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(max(0.0, deadline - time.monotonic()))
        launcher.kill()


def await_step(log: Path, step: int) -> None:
    """Until the step is in the log."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while f'"step": {step},' not in log.read_text():
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} was not reached:\n{log.read_text()}")
        time.sleep(0.02)


def main(directory: Path, config: str, step: int) -> None:
    """The clean run, the one that loses its network, and the one that follows it."""
    with cabled() as nodes:
        seen = {"clean": run(nodes, directory, "clean", config)}
        seen["cut"] = run(nodes, directory, "cut-1", config, pull_at=step)
        nodes[1].link("up")
        seen["again"] = run(nodes, directory, "cut-2", config)
    print("RESULT " + json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
