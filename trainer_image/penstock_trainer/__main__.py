"""Container entry of a node: our trainer, or with the first argument `launch` anybody's script.

    python -m penstock_trainer --config=<JSON> --<dotted.field>=<value> ...
    python -m penstock_trainer launch [--processes-per-node=N] [--max-restarts=N]
        [--checkpoint-dir=DIR [--checkpoint-uri=gs://...] [--sync-seconds=60]] -- python train.py ...
    python -m penstock_trainer launch --nodes=MIN:MAX ... -- python train.py ...   (see elastic.py)

Exit codes: 0 every rank of every node is done; 134 another try can help (preempted with state saved, a rank or node
was lost, a collective failed); 1 anything else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock_trainer.cluster import ClusterError
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.elastic import launch_elastic
from penstock_trainer.launch import CheckpointDir, LaunchError, launch_script, launch_trainer
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.outcome import RETRYABLE
from penstock_trainer.rendezvous import RendezvousError
from penstock_trainer.storage import StorageError, StorageUnavailableError

logger = logging.getLogger("penstock_trainer")


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    log_to_stderr(logging.INFO)
    try:
        if argv[:1] == ["launch"]:
            return _launch(argv[1:])
        return launch_trainer(argv, os.environ)
    except (RendezvousError, StorageUnavailableError) as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return RETRYABLE
    except (ContractError, ClusterError, LaunchError, StorageError) as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1


def _launch(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock_trainer launch",
        usage="%(prog)s [--processes-per-node=N] [--max-restarts=N] [--nodes=MIN:MAX] "
        "[--checkpoint-dir=DIR [--checkpoint-uri=URI] [--sync-seconds=S]] -- COMMAND ...",
    )
    parser.add_argument("--processes-per-node", type=int, help="default: visible accelerators, else 1")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="times that all ranks are started again; default: %(default)s",
    )
    parser.add_argument(
        "--nodes",
        metavar="MIN:MAX",
        help="go on with any number of nodes in this range, by torchrun's rendezvous",
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="directory that each node copies to storage and restores"
    )
    parser.add_argument("--checkpoint-uri", default="", help="default: AIP_CHECKPOINT_DIR")
    parser.add_argument("--sync-seconds", type=float, default=60.0, help="default: %(default)s")
    if "--" not in argv:
        parser.error("give the command after --")
    split = list(argv).index("--")
    options = parser.parse_args(argv[:split])
    if options.checkpoint_dir is None and options.checkpoint_uri:
        parser.error("--checkpoint-uri says where --checkpoint-dir is copied to; give that too")
    if options.nodes is not None:
        if options.checkpoint_dir is not None:
            # A node's copy is restored by its place among the nodes, which changes here with every node that comes or
            # goes: it would get another node's files, and those of a lost node would be nobody's.
            parser.error(
                "--checkpoint-dir is copied per node and cannot be had with --nodes, where nodes come and go; let the "
                "script keep its checkpoints where all nodes see them (gs://..., /gcs/...)"
            )
        return launch_elastic(
            argv[split + 1 :],
            os.environ,
            nodes=options.nodes,
            processes_per_node=options.processes_per_node,
            max_restarts=options.max_restarts,
        )
    return launch_script(
        argv[split + 1 :],
        os.environ,
        processes_per_node=options.processes_per_node,
        max_restarts=options.max_restarts,
        checkpoint_dir=CheckpointDir(
            path=options.checkpoint_dir, uri=options.checkpoint_uri, sync_seconds=options.sync_seconds
        )
        if options.checkpoint_dir
        else None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
