"""Identify the state of the source, so that staging is cached exactly as long as the data is the same.

python -m penstock_components.launchers.fingerprint --executor-input '{{$}}'
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_components.launchers import executor
from penstock_components.launchers.sources import fingerprint_of, list_sources

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    source_uri: str


def fingerprint(task: executor.ExecutorInput) -> None:
    """Write the fingerprint of the objects behind `source_uri`."""
    inputs = task.parameters_as(Inputs)
    sources = list_sources(inputs.source_uri)
    value = fingerprint_of(sources)
    size = sum(source.size for source in sources)
    log.info("%s: %d objects, %d bytes, fingerprint %s", inputs.source_uri, len(sources), size, value)
    executor.write_outputs(task, parameters={"fingerprint": value})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the task."""
    return executor.run(fingerprint, argv)


if __name__ == "__main__":
    sys.exit(main())
