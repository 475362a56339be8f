"""Log lines as Cloud Logging understands them, one JSON object a line, unless a person reads them on a terminal.

`severity`, `message` and `time` are the names that Cloud Logging takes for its own (docs: structured logging). Without
them every line of stderr is an entry of severity ERROR, and a traceback is an entry per line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

_ON_A_TERMINAL = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record; an exception's traceback is part of the message."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        """`labels` are fields of every line, such as the rank."""
        super().__init__()
        self._labels = dict(labels)

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter.format."""
        return json.dumps(
            {
                "severity": record.levelname,
                "message": super().format(record),
                "logger": record.name,
                "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),  # noqa: UP017  # the launcher also runs on Python 3.10
                **self._labels,
            },
            ensure_ascii=False,
        )


def log_to_stderr(level: int, *, stream: TextIO | None = None, **labels: Any) -> None:
    """Have this process log to stderr (or to `stream`), as JSON with these labels unless that is a terminal.

    To be called once by a program's main. Python's warnings become log lines too.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    is_read = handler.stream.isatty()
    handler.setFormatter(logging.Formatter(_ON_A_TERMINAL) if is_read else JsonFormatter(labels))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


def structured(line: str) -> dict[str, Any] | None:
    """The fields of a line that is one JSON object with a severity and a message, ours or anybody's; else None."""
    if not line.startswith("{"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    is_entry = isinstance(told, dict) and {"severity", "message"} <= told.keys()
    return told if is_entry else None


def readable(text: str) -> str:
    """Output of a program with its structured log lines as on a terminal: `time INFO logger: message`."""
    lines = []
    for line in text.splitlines(keepends=True):
        told = structured(line)
        is_log = told is not None and "logger" in told
        lines.append(
            "{time} {severity} {logger}: {message}\n".format(**told) if is_log and told is not None else line
        )
    return "".join(lines)
