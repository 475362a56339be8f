"""The stand-in as a background process: started on a state directory, found again by it, and stopped.

The stand-in is another program; all that passes between the two is its command line and `server.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock_pipelines.errors import InputError, ServiceError
from penstock_pipelines.settings import Settings

DEFAULT_STATE = Path(".penstock")
MARKER = "penstock-state"
"""File that tells a state directory from any other: only a directory that has it is used, or deleted."""
_EPHEMERAL = "ephemeral"
"""File that says that the running stand-in ends with the `run` that has started it."""
_START_SECONDS = 60.0
_STOP_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running stand-in."""

    state: Path
    pid: int
    front_port: int
    variables: Mapping[str, str]
    """What a client sets."""
    unset: tuple[str, ...]
    """What a client removes."""

    def environment(self) -> dict[str, str]:
        """This process's environment, in which clients find the stand-in."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset}
        return {**kept, **self.variables}

    def stop(self) -> None:
        """End it and wait until it is gone: it cancels what it runs first. Raises ServiceError after 90 s."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while _is_held(self.state) or not _is_gone(self.pid):
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the stand-in (process {self.pid}) did not end within {_STOP_SECONDS:.0f} s."
                )
            time.sleep(0.05)


def find_server(state: Path) -> LocalServer | None:
    """The stand-in that runs on a state directory, or None."""
    try:
        told = json.loads((state / "server.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not _is_held(state):
        return None  # what the file of a killed stand-in says is over, and its process id may be another's by now
    return LocalServer(state, told["pid"], told["front_port"], told["environment"], tuple(told["unset"]))


def start_server(
    state: Path, settings: Settings, *, port: int = 0, images: Path | None = None, ephemeral: bool = False
) -> LocalServer:
    """Start a stand-in in the background and wait until it serves.

    `images` is a further image map, added to the one of the settings' images. Raises InputError when the state
    directory or the port is in use or the directory is not one of a stand-in, ServiceError when it does not come up.
    """
    _prepare_state(state)
    (state / _EPHEMERAL).touch() if ephemeral else (state / _EPHEMERAL).unlink(missing_ok=True)
    image_map = state / "images.toml"
    image_map.write_text(_image_map(settings) + (images.read_text() if images else ""))
    log = state / "server.log"
    command = [
        sys.executable, "-m", "penstock_local", "--state", str(state), "--project", settings.project,
        "--location", settings.location, "--bucket", settings.bucket, "--images", str(image_map), "--port", str(port),
        "--job-validator", "penstock_components.jobs.check:refusals",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return _await_server(state, process, log)
    except BaseException:  # an interrupt too: nobody would know of the process
        process.terminate()
        process.wait()
        raise


@contextlib.contextmanager
def server_on(state: Path, settings: Settings, *, images: Path | None = None) -> Iterator[LocalServer]:
    """The stand-in that runs on a state directory, or one for the duration of the block.

    Raises as `start_server`, and InputError when the one that runs there is another command's and ends with it.
    """
    server = find_server(state)
    if server is not None:
        if (state / _EPHEMERAL).exists():
            raise InputError(
                f"another `penstock run` uses {state}, and its stand-in ends with it. Wait for it, give another "
                f"--state, or start a lasting stand-in with `penstock local up --state {state}`."
            )
        yield server
        return
    server = start_server(state, settings, images=images, ephemeral=True)
    try:
        yield server
    finally:
        server.stop()


def is_state(state: Path) -> bool:
    """Whether a directory is the state directory of a stand-in."""
    return (state / MARKER).is_file()


def reset_state(state: Path) -> None:
    """Delete a state directory. Raises InputError when a stand-in uses it, or when it is not one."""
    state = state.resolve()
    if _is_held(state):
        raise InputError(
            f"a stand-in is running on {state}; stop it with `penstock local down --state {state}`."
        )
    _refuse_foreign(state)
    if state.exists():
        shutil.rmtree(state)


def _prepare_state(state: Path) -> None:
    if _is_held(state):
        raise InputError(
            f"the state directory {state} is in use by a stand-in that starts or ends; try again."
        )
    _refuse_foreign(state)
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / MARKER).touch()
    except OSError as exc:
        raise InputError(f"the state directory {state} cannot be made: {exc}") from exc


def _refuse_foreign(state: Path) -> None:
    """A directory with something in it that no stand-in has made is left as it is."""
    if state.exists() and not is_state(state) and (not state.is_dir() or any(state.iterdir())):
        raise InputError(
            f"{state} is not the state directory of a stand-in; it is left as it is. Give another --state."
        )


def _await_server(state: Path, process: subprocess.Popen[bytes], log: Path) -> LocalServer:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        server = find_server(state)
        if server is not None and server.pid == process.pid:
            return server
        code = process.poll()
        if code is not None:
            error = InputError if code == 2 else ServiceError
            raise error(f"the stand-in did not start:\n{log.read_text().strip()}")
        time.sleep(0.05)
    raise ServiceError(f"the stand-in did not serve within {_START_SECONDS:.0f} s; its log is {log}.")


def _image_map(settings: Settings) -> str:
    """Both of our images are this interpreter: locally they are built from what is installed here."""
    repositories = {_repository(image) for image in (settings.images.components, settings.images.trainer)}
    tables = [
        f"[images.{json.dumps(r)}]\npython = {json.dumps(sys.executable)}\n" for r in sorted(repositories)
    ]
    return "# Written by `penstock`.\n" + "\n".join(tables)


def _repository(image: str) -> str:
    head, slash, last = image.partition("@")[0].rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of this process stays in the table until somebody asks
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _is_held(state: Path) -> bool:
    """Whether a stand-in uses the state directory: it holds a lock there from its start to its very end."""
    try:
        descriptor = os.open(state / "lock", os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
