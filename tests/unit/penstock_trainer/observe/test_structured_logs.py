"""Log lines as Cloud Logging reads them."""

from __future__ import annotations

import io
import json
import logging
import queue
import subprocess
import sys

import pytest

from penstock_trainer.observe.structured_logs import JsonFormatter, readable, structured
from penstock_trainer.outcome import RankEnd
from penstock_trainer.ranks import Ranks


def logged(program: str) -> list[str]:
    """Lines of stderr of a program that logs as ours do."""
    setup = (
        "import logging, warnings\n"
        "from penstock_trainer.observe.structured_logs import log_to_stderr\n"
        "log_to_stderr(logging.INFO, rank=3)\n"
        "logger = logging.getLogger('ours')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return done.stderr.splitlines()


def test_a_line_has_the_fields_that_cloud_logging_takes_for_its_own() -> None:
    (line,) = logged("logger.info('step %d', 7)")
    told = json.loads(line)
    assert {name: told[name] for name in ("severity", "message", "logger", "rank")} == {
        "severity": "INFO",
        "message": "step 7",
        "logger": "ours",
        "rank": 3,
    }
    assert told["time"].endswith("+00:00")


def test_an_exception_is_one_line_with_its_traceback_in_the_message() -> None:
    (line,) = logged("try: 1 / 0\nexcept ZeroDivisionError: logger.exception('no')")
    told = json.loads(line)
    assert told["severity"] == "ERROR"
    assert told["message"].startswith("no\nTraceback")
    assert told["message"].endswith("ZeroDivisionError: division by zero")


def test_a_warning_of_python_is_a_warning_and_no_error() -> None:
    (line,) = logged("warnings.warn('old', FutureWarning)")
    assert json.loads(line)["severity"] == "WARNING"


def test_a_terminal_gets_text() -> None:
    program = """
import logging, os, pty, sys
from penstock_trainer.observe.structured_logs import log_to_stderr
ours, theirs = pty.openpty()
log_to_stderr(logging.INFO, stream=os.fdopen(theirs, "w"))
logging.getLogger("ours").info("told")
sys.stdout.write(os.read(ours, 1000).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip().endswith("INFO ours: told")


def test_what_is_readable_is_what_a_terminal_shows() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter({}))
    handler.handle(logging.makeLogRecord({"name": "ours", "levelname": "INFO", "msg": 'a "quoted" Stäbe\nb'}))
    event = '{"severity": "INFO", "message": "step 1", "event": "step"}\n'
    time = json.loads(stream.getvalue())["time"]
    shown = f'plain\n{time} INFO ours: a "quoted" Stäbe\nb\n{event}'
    assert readable(f"plain\n{stream.getvalue()}{event}") == shown


@pytest.mark.parametrize("line", ["text", "{}", '{"severity": "INFO"}', "{broken", '["severity", "message"]'])
def test_other_lines_are_not_structured(line: str) -> None:
    assert structured(line) is None


def test_a_log_line_of_another_rank_stays_one_that_cloud_logging_can_read(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    program = (
        "import logging, sys\n"
        "from penstock_trainer.observe.structured_logs import log_to_stderr\n"
        "log_to_stderr(logging.INFO, rank=1)\n"
        "logging.getLogger('ours').warning('slow')\n"
        "sys.stderr.write('plain\\n')\n"
    )
    events: queue.SimpleQueue[RankEnd | int] = queue.SimpleQueue()
    with Ranks(events) as ranks:
        ranks.start(1, [sys.executable, "-c", program], {"PYTHONPATH": ":".join(sys.path)}, None)
        events.get(timeout=30)
    structured_line, plain_line = capfdbinary.readouterr().err.decode().splitlines()
    assert json.loads(structured_line)["rank"] == 1
    assert plain_line == "[rank 1] plain"
