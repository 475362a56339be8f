from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_local.jobs.processes import ManagedProcess, ProcessRecord, base_environment

SLEEP = "import time; time.sleep(60)"


class Program:
    """A started Python program and what it has said."""

    def __init__(self, code: str, directory: Path, record: ProcessRecord) -> None:
        self.lines: list[tuple[str, str]] = []
        self.process = ManagedProcess(
            ["python", "-c", code],
            env=base_environment(Path(sys.executable)),
            cwd=directory,
            sink=lambda severity, line: self.lines.append((severity, line)),
            record=record,
        )

    def first_line(self) -> str:
        until(lambda: bool(self.lines))
        return self.lines[0][1]


@pytest.fixture
def record(tmp_path: Path) -> ProcessRecord:
    return ProcessRecord(tmp_path / "processes")


@pytest.fixture
def run(tmp_path: Path, record: ProcessRecord) -> Callable[[str], Program]:
    return lambda code: Program(code, tmp_path, record)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Not so for a process that has ended and that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_child(**session: Any) -> str:
    """A program that starts another one, says its process id and sleeps."""
    return (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], **{session!r})\n"
        "print(child.pid, flush=True)\n"
    )


def test_every_line_is_kept_with_its_stream_before_wait_returns(run: Callable[[str], Program]) -> None:
    told = run("import sys; print('a\\n\\nb'); print('c', file=sys.stderr); sys.stdout.write('no end')")
    assert told.process.wait() == 0
    assert [line for severity, line in told.lines if severity == "INFO"] == ["a", "b", "no end"]
    assert [line for severity, line in told.lines if severity == "ERROR"] == ["c"]


def test_bytes_that_are_no_text_and_endless_lines_are_kept_as_well(run: Callable[[str], Program]) -> None:
    told = run("import os; os.write(1, b'\\xff\\n' + b'x' * 200_000)")
    told.process.wait()
    assert told.lines[0] == ("INFO", "\ufffd")
    assert sum(len(line) for _, line in told.lines[1:]) == 200_000


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
    ],
)
def test_exit_codes_are_those_that_a_container_shows(
    run: Callable[[str], Program], code: str, expected: int
) -> None:
    assert run(code).process.wait() == expected


@pytest.mark.parametrize("session", [{}, {"start_new_session": True}])
def test_what_a_program_leaves_running_ends_with_it(
    run: Callable[[str], Program], session: dict[str, Any]
) -> None:
    told = run(start_child(**session))
    assert told.process.wait() == 0
    until(lambda: not is_running(int(told.lines[0][1])))


@pytest.mark.parametrize("session", [{}, {"start_new_session": True}])
def test_a_killed_program_takes_all_that_it_started_with_it(
    run: Callable[[str], Program], session: dict[str, Any]
) -> None:
    told = run(start_child(**session) + "time.sleep(60)")
    child = int(told.first_line())
    assert told.process.signal(signal.SIGKILL)
    assert told.process.wait() == 137
    until(lambda: not is_running(child))
    assert not told.process.signal(signal.SIGKILL), "it has ended"


def test_a_daemon_that_cannot_be_found_and_keeps_the_output_open_is_not_waited_for(
    run: Callable[[str], Program],
) -> None:
    told = run(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}, start_new_session=True)\n"
        "print(child.pid)"
    )
    started = time.monotonic()
    try:
        assert told.process.wait() == 0
        assert time.monotonic() - started < 10
    finally:
        os.kill(int(told.lines[0][1]), signal.SIGKILL)


def test_a_group_is_killed_while_its_id_cannot_be_anothers(
    run: Callable[[str], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    kill = os.killpg

    def killpg(group: int, number: int) -> None:
        states.append(Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0])
        kill(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    assert run("pass").process.wait() == 0
    assert states == ["Z"], "it has ended and is not reaped"


def test_stop_lets_a_program_save_and_tells_it_alone(run: Callable[[str], Program]) -> None:
    child = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('child', flush=True)); time.sleep(60)"
    told = run(
        "import signal, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    told.first_line()
    stopper = threading.Thread(target=told.process.stop, args=(10,))
    stopper.start()
    assert told.process.wait() == 0
    stopper.join()
    assert [line for _, line in told.lines] == ["ready", "saved"]


def test_stop_kills_what_does_not_listen_when_the_grace_is_over(run: Callable[[str], Program]) -> None:
    told = run(
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"
    )
    told.first_line()
    asked = time.monotonic()
    told.process.stop(0.3)
    assert told.process.wait() == 137
    assert 0.3 <= time.monotonic() - asked < 5
    told.process.stop(10)  # an ended one is left as it is


def test_a_program_that_vanishes_is_told_nothing_and_takes_its_tree_with_it(
    run: Callable[[str], Program],
) -> None:
    saves = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('saved', flush=True))\n"
    told = run(saves + start_child(start_new_session=True) + "time.sleep(60)")
    child = int(told.first_line())
    assert set(told.process.tree()) == {told.process.pid, child}
    told.process.vanish()
    assert told.process.wait() == 128 + signal.SIGKILL
    assert [line for _, line in told.lines] == [str(child)]
    assert not is_running(child)
    assert told.process.tree() == []
    told.process.vanish()  # a second call does nothing


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path, record: ProcessRecord) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ManagedProcess(["no-such-program"], env={}, cwd=tmp_path, sink=lambda *_: None, record=record)


def test_little_of_the_stand_ins_own_environment_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost")
    told = base_environment(Path("/opt/venv/bin/python"))
    assert not {"SECRET", "PYTHONPATH"} & set(told)
    assert told["PIP_INDEX_URL"] == "http://localhost"
    assert told["PATH"].startswith("/opt/venv/bin:")


def test_leftovers_of_a_killed_stand_in_are_killed_and_nothing_else(
    tmp_path: Path, record: ProcessRecord
) -> None:
    """The stand-in that is killed is a process that starts a program and ends at once."""
    program = start_child(start_new_session=True) + "time.sleep(60)"
    start = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from penstock_local.jobs.processes import ManagedProcess, ProcessRecord\n"
        f"record = ProcessRecord(Path({str(tmp_path / 'processes')!r}))\n"
        "told = []\n"
        f"process = ManagedProcess([sys.executable, '-c', {program!r}], env={{}}, cwd=Path(),"
        " sink=lambda _, line: told.append(line), record=record)\n"
        "while not told: time.sleep(0.01)\n"
        "print(process.pid, told[0], flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        program_pid, child_pid = (int(word) for word in killed.stdout.readline().split())
        killed.kill()
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    (tmp_path / "processes" / str(bystander.pid)).write_text("1")  # an earlier process of this id
    try:
        assert is_running(program_pid)
        assert is_running(child_pid)
        record.kill_leftovers()
        until(lambda: not is_running(program_pid) and not is_running(child_pid))
        assert is_running(bystander.pid)
        assert list((tmp_path / "processes").iterdir()) == []
    finally:
        bystander.kill()
        bystander.wait()
