"""The `penstock` command as a process: interrupted, and on a stand-in that is someone else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compiled import ROOT, compiled

PENSTOCK = [sys.executable, "-m", "penstock_pipelines.cli", "--settings", str(ROOT / "penstock.toml")]


def mentions(process: psutil.Process, text: str) -> bool:
    """Whether a process has `text` in its command line or environment."""
    try:
        return text in " ".join(process.cmdline()) or text in " ".join(process.environ().values())
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def processes_of(state: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if mentions(process, str(state))]


AS_A_TERMINAL = "--default-signal=INT,HUP"
IN_THE_BACKGROUND = "--ignore-signal=INT,HUP"
"""As a script's `nohup ... &` starts it; ignored signals are inherited."""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """`penstock run` in a process group of its own, as a terminal starts it or as the parameter says."""
    started = ["env", getattr(request, "param", AS_A_TERMINAL)]
    corpus = ROOT / "pipelines" / "examples" / "stdlib_corpus.py"
    process = subprocess.Popen(
        [
            *started,
            *PENSTOCK,
            "run",
            "tiny-fsdp",
            "--state",
            str(tmp_path / "state"),
            "--prepare",
            str(corpus),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    with process:  # closes the pipe
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for left in processes_of(tmp_path / "state"):  # of a test that failed
        left.kill()


@pytest.mark.parametrize("moment", ["stand-in:", "stage-data: running", "custom-training-job: step"])
def test_an_interrupt_at_any_moment_leaves_no_process_behind(
    run: subprocess.Popen[str], tmp_path: Path, moment: str
) -> None:
    assert run.stdout is not None
    seen = next(line for line in run.stdout if moment in line)
    assert seen
    os.killpg(run.pid, signal.SIGINT)
    output = run.stdout.read()
    assert run.wait(60) == 130, output
    if moment != "stand-in:":  # then it is the user's own script that is interrupted
        assert "Traceback" not in output
    assert processes_of(tmp_path / "state") == []


@pytest.mark.parametrize("run", [AS_A_TERMINAL, IN_THE_BACKGROUND], indirect=True)
def test_a_command_that_is_terminated_leaves_no_process_behind(
    run: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert run.stdout is not None
    assert next(line for line in run.stdout if "stage-data: running" in line)
    run.terminate()  # reaches the command alone, not its group
    output = run.stdout.read()
    assert run.wait(60) == 130, output
    assert processes_of(tmp_path / "state") == []


def test_a_schedule_is_made_and_told(tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state")]
    pipeline = str(compiled("tiny-fsdp"))
    subprocess.run([*PENSTOCK, "local", "up", *state], capture_output=True, check=True)
    try:
        made = subprocess.run(
            [*PENSTOCK, "schedule", "create", pipeline, "--cron", "TZ=Europe/Berlin 0 3 * * 1", *state],
            capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert "/schedules/" in made.stdout
        assert "next run 20" in made.stdout
    finally:
        subprocess.run([*PENSTOCK, "local", "down", *state], capture_output=True, check=True)


def test_a_state_directory_in_use_and_a_foreign_directory_are_left_alone(tmp_path: Path) -> None:
    state, foreign = tmp_path / "state", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    up = subprocess.run([*PENSTOCK, "local", "up", "--state", str(state)], capture_output=True, text=True)
    try:
        assert up.returncode == 0, up.stderr
        for arguments, message in [
            (["local", "up", "--state", str(state)], "is running on"),
            (["run", "--reset", "--state", str(state)], "is running on"),
            (["run", "--reset", "--state", str(foreign)], "is not the state directory"),
            (["run", "--state", str(foreign)], "is not the state directory"),
            (["local", "up", "--state", str(foreign / "thesis.txt")], "is not the state directory"),
        ]:
            done = subprocess.run([*PENSTOCK, *arguments], cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 2
            assert message in done.stderr
        assert (foreign / "thesis.txt").read_text() == "years of work"
    finally:
        down = subprocess.run(
            [*PENSTOCK, "local", "down", "--state", str(state)], capture_output=True, text=True
        )
    assert down.returncode == 0
    time.sleep(0.1)
    assert processes_of(state) == []
