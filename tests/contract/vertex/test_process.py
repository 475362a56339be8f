"""The program itself: how it refuses to start, how it ends, and what a killed one leaves to its successor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from contract.vertex.stand_in import IMAGE, Rest, StandIn, command, start

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
# A replica that does not mind SIGTERM's being sent to others, with a child in a session of its own.
TREE = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
    "print(child.pid, flush=True); time.sleep(60)"
)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[StandIn]:
    """A stand-in that a test may kill."""
    stand_in = start(tmp_path)
    yield stand_in
    stand_in.process.kill()
    stand_in.process.wait()


def refused(*arguments: str, state: Path) -> tuple[int, str]:
    done = subprocess.run(command(state, *arguments), capture_output=True, text=True, timeout=30)
    return done.returncode, done.stderr.splitlines()[-1]


def run_tree(rest: Rest) -> tuple[str, int]:
    container = {"imageUri": IMAGE, "command": ["python", "-c", TREE]}
    spec = {"workerPoolSpecs": [{"replicaCount": "1", "containerSpec": container}]}
    name: str = rest.call("POST", JOBS, {"displayName": "tree", "jobSpec": spec})["name"]
    return name, int(rest.first_line(name))


def processes_of(state: Path) -> list[str]:
    """Command lines of what runs with an environment or argument that names the state directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(state).encode() in told and int(process.name) != os.getpid():
            found.append((process / "cmdline").read_bytes().decode())
    return found


def test_a_port_in_use_is_told_and_exits_with_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = refused("--port", str(port), state=tmp_path / "state")
    assert code == 2
    assert message.startswith(f"error: cannot listen on 127.0.0.1:{port} (Address already in use")


def test_a_bad_setting_is_told_and_exits_with_2(tmp_path: Path) -> None:
    code, message = refused("--bucket", "Not A Bucket", state=tmp_path / "state")
    assert code == 2
    assert "bucket 'Not A Bucket' cannot be made" in message


def test_sigterm_ends_everything_and_frees_the_state_directory(own: StandIn) -> None:
    code, message = refused(state=own.state)
    assert code == 2
    assert f"is in use by a stand-in with process id {own.process.pid}" in message

    with closing(Rest(own)) as rest:
        name, _ = run_tree(rest)
        assert len(processes_of(own.state)) == 3  # the stand-in, the replica and its child
        asked = time.monotonic()
        assert own.stop() == 0
        assert time.monotonic() - asked < 5  # an idle connection of a client does not hold it up
    assert processes_of(own.state) == []
    assert not (own.state / "server.json").exists()
    assert "Traceback" not in own.log.read_text()

    again = start(own.state.parent)
    with closing(Rest(again)) as rest:
        assert rest.call("GET", f"v1/{name}")["state"] == "JOB_STATE_CANCELLED"
    assert again.stop() == 0


def test_a_stand_in_is_published_until_everything_has_ended(own: StandIn) -> None:
    save = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0))); "
        "print('ready', flush=True); time.sleep(60)"
    )
    with closing(Rest(own)) as rest:
        container = {"imageUri": IMAGE, "command": ["python", "-c", save]}
        spec = {"workerPoolSpecs": [{"replicaCount": "1", "containerSpec": container}]}
        name = rest.call("POST", JOBS, {"displayName": "saves", "jobSpec": spec})["name"]
        rest.wait_for_line(name, "workerpool0-0", "ready")
        own.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert (own.state / "server.json").exists()
    assert own.process.wait(20) == 0
    assert not (own.state / "server.json").exists()


def test_what_a_killed_stand_in_left_running_is_ended_by_the_next(own: StandIn) -> None:
    with closing(Rest(own)) as rest:
        name, child = run_tree(rest)
    own.process.send_signal(signal.SIGKILL)
    own.process.wait()
    assert Path(f"/proc/{child}").exists()
    (own.state / "server.json").unlink()
    again = start(own.state.parent)
    assert len(processes_of(own.state)) == 1, "only the new stand-in"
    with closing(Rest(again)) as rest:
        job = rest.call("GET", f"v1/{name}")
    assert job["state"] == "JOB_STATE_FAILED"
    assert "ended while this job was running" in job["error"]["message"]
    assert again.stop() == 0
