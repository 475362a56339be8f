"""Run a stand-in in the foreground: `python -m penstock_local --state DIR [--images MAP] [--bucket NAME ...]`.

It serves until SIGTERM or SIGINT, then ends what it runs. A second signal does not hurry it: what runs has
30 seconds to save.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from penstock_local.jobs.images import ImageMapError
from penstock_local.server import ConfigError, LocalVertex, LocalVertexConfig
from penstock_local.state import StateInUseError


def main() -> int:
    """Exit code 0 after an orderly end, 2 for bad arguments or a state directory or port that cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = _parser().parse_args()
    config = LocalVertexConfig(
        state=arguments.state,
        project_id=arguments.project,
        location=arguments.location,
        buckets=tuple(arguments.bucket),
        images=arguments.images,
        job_validator=arguments.job_validator,
        port=arguments.port,
    )
    try:
        asyncio.run(_serve(config))
    except (StateInUseError, ImageMapError, ConfigError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    return 0


async def _serve(config: LocalVertexConfig) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    vertex = LocalVertex(config)
    info = await vertex.start()
    logging.getLogger(__name__).info("serving project %s on 127.0.0.1:%d", info.project_id, info.front_port)
    await stopped.wait()
    await vertex.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock_local", description=__doc__)
    parser.add_argument(
        "--state", type=Path, required=True, help="directory of everything the stand-in keeps"
    )
    parser.add_argument("--project", default="demo", help="id of the project that is served")
    parser.add_argument("--location", default="us-central1", help="default location of clients and buckets")
    parser.add_argument(
        "--bucket", action="append", default=[], help="bucket to make if it does not exist; repeatable"
    )
    parser.add_argument("--images", type=Path, help="image map (TOML)")
    parser.add_argument("--job-validator", default="", help="MODULE:FUNCTION that checks every CustomJob")
    parser.add_argument("--port", type=int, default=0, help="port of the front door; 0 takes a free one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
