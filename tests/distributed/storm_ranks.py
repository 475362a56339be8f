"""The launcher and the ranks of test_kill_storm.py: rank 0 kills a rank at an exact moment of the first round.

    python -m distributed.storm_ranks launch --config=...      a node's launcher of our trainer's ranks
    python -m distributed.storm_ranks --config=...             a rank, as the launcher starts it

STORM in the environment is `Storm` as JSON. The moment is one of the interpreter's own audit events (os.link, os.mkdir,
...), which are raised before the system is called, so nothing of the trainer is replaced for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Storm:
    """Who is killed, and when."""

    directory: str
    """Where every rank of the first round leaves its process id."""
    victim: int
    moment: list[tuple[list[str], str]]
    """Events of rank 0, each as its possible names and a text in its arguments; the kill comes with the last."""

    def install(self, rank: int) -> None:
        """On every rank of the first round."""
        (Path(self.directory) / f"rank-{rank}").write_text(str(os.getpid()))
        if rank == 0:
            waiting = list(self.moment)

            def hear(event: str, arguments: tuple[Any, ...]) -> None:
                if not waiting:
                    return
                names, text = waiting[0]
                if event in names and text in " ".join(map(str, arguments)):
                    del waiting[0]
                    if not waiting:
                        self._kill()

            sys.addaudithook(hear)

    def _kill(self) -> None:
        pid = int((Path(self.directory) / f"rank-{self.victim}").read_text())
        os.kill(pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    if argv[:1] == ["launch"]:
        from penstock_trainer.launch import launch_trainer

        logging.basicConfig(level=logging.INFO)
        return launch_trainer(argv[1:], os.environ, rank_module="distributed.storm_ranks")
    if os.environ["PENSTOCK_RESTART"] == "0":
        Storm(**json.loads(os.environ["STORM"])).install(int(os.environ["RANK"]))
    from penstock_trainer import rank

    return rank.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
