"""Everything that the end-to-end tests look at, done once with stock clients: `python scenario.py WORKDIR SETTINGS`.

One stand-in, five runs of compiled pipelines. What was seen is written to WORKDIR/seen.json; the tests assert on it.

    first, reduced        at once, undisturbed: FSDP on two nodes; ZeRO-2 with a Reduction Server pool
    killed, terminated    the same two files again, at once: a worker gets SIGKILL, a primary gets SIGTERM
    broken                beside them: parameters that the trainer refuses
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import requests
from small_recipes import INTERVAL, compile_small

from penstock_pipelines.local import LocalServer, start_server
from penstock_pipelines.settings import load_settings

_EXAMPLES = Path(__file__).parents[2] / "pipelines" / "examples"
_CORPUS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from google.cloud import storage
from stdlib_corpus import standard_library
texts = [text for _, text in standard_library() if 2000 < len(text) < 12000][:40]
data = "".join(json.dumps({"text": text}) + "\\n" for text in texts)
storage.Client().bucket(sys.argv[2]).blob("raw/a path with spaces.jsonl").upload_from_string(data)
"""
# A few steps of a hundred thousand parameters do not beat the baseline; here the way counts.
_NO_FLOOR = ("-p", "min_improvement_over_unigram=-1.0")
_OUTSIDER = Path(__file__).with_name("outsider.py")


def main() -> None:
    work, settings_file = Path(sys.argv[1]), Path(sys.argv[2])
    settings = load_settings(settings_file)
    compiled = compile_small(settings, work)
    server = start_server(work / "state", settings)
    seen: dict[str, Any] = {}
    try:
        runs = Runs(server, settings_file, work)
        runs.python("-c", _CORPUS, str(_EXAMPLES), settings.bucket)
        seen["first"], seen["reduced"] = together(
            lambda: runs.run("first", compiled["fsdp-full"]),
            lambda: runs.run("reduced", compiled["zero2"]),
        )
        seen["killed"], seen["terminated"], seen["broken"] = together(
            lambda: runs.run("killed", compiled["fsdp-full"], disturb=("workerpool1-0", "SIGKILL")),
            lambda: runs.run("terminated", compiled["zero2"], disturb=("workerpool0-0", "SIGTERM")),
            lambda: runs.run("broken", compiled["fsdp-full"], "-p", "steps=2"),
        )
        seen["outsider"] = json.loads(runs.python(str(_OUTSIDER)).splitlines()[-1])
        seen["unauthenticated"] = runs.ask_status().status_code
        seen["status"] = runs.ask_status(token=runs.python("-c", _TOKEN).strip()).json()
        seen["logs"] = runs.penstock(
            "logs", "killed", "--replica", "workerpool0-0", "--state", str(work / "state")
        )[1]
    finally:
        server.stop()
        (work / "seen.json").write_text(json.dumps(seen, indent=1))


class Runs:
    """Runs of compiled pipelines on one stand-in, through the `penstock` command."""

    def __init__(self, server: LocalServer, settings_file: Path, work: Path) -> None:
        self._server = server
        self._settings_file = settings_file
        self._work = work

    def run(
        self, run_id: str, compiled: Path, *arguments: str, disturb: tuple[str, str] | None = None
    ) -> Any:
        """Submit, disturb, follow to the end; returns what the run came to."""
        if disturb is not None:
            threading.Thread(target=self._disturb, args=(run_id, *disturb), daemon=True).start()
        started = time.monotonic()
        code, output = self.penstock(
            "submit",
            str(compiled),
            "--run-id",
            run_id,
            "--report-dir",
            str(self._work / "reports"),
            *_NO_FLOOR,
            *arguments,
        )
        told = json.loads(self.python(str(Path(__file__).with_name("look.py")), run_id).splitlines()[-1])
        return {"exit_code": code, "output": output, "seconds": time.monotonic() - started, **told}

    def penstock(self, *arguments: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "penstock_pipelines.cli",
            "--settings",
            str(self._settings_file),
            *arguments,
        ]
        done = subprocess.run(command, env=self._server.environment(), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def python(self, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=self._server.environment(), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def ask_status(self, token: str = "") -> requests.Response:
        """What the stand-in says of itself, if it answers."""
        session = requests.Session()
        session.trust_env = False  # the environment has a proxy that leads nowhere, see the fixture
        url = f"http://127.0.0.1:{self._server.front_port}/penstock/status"
        return session.get(url, headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=60)

    def _disturb(self, run_id: str, replica: str, signal_name: str) -> None:
        """Send a signal to a replica when its run has a checkpoint: the second save waits for the first one's commit."""
        disturb, step = str(Path(__file__).with_name("disturb.py")), str(2 * INTERVAL + 3)
        self.python(disturb, str(self._server.front_port), run_id, step, replica, signal_name)


_TOKEN = """
import google.auth, google.auth.transport.requests
credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
credentials.refresh(google.auth.transport.requests.Request())
print(credentials.token)
"""


def together(*bodies: Any) -> list[Any]:
    """Run the bodies at once; results in order. The first failure is raised."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def guard(index: int, body: Any) -> None:
        try:
            results[index] = body()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guard, args=(index, body)) for index, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


if __name__ == "__main__":
    main()
