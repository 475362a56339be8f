"""A stand-in as a process, and client programs that know nothing of it but their environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from google.auth.transport.requests import AuthorizedSession, Request
from google.oauth2 import service_account

BUCKET = "test-bucket"
IMAGE = "europe-docker.pkg.dev/acme/tests/python"
# By this prefix the SDK knows the images that take Python packages.
EXECUTOR_IMAGE = "europe-docker.pkg.dev/vertex-ai/training/tests"
_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StandIn:
    """A running stand-in."""

    process: subprocess.Popen[str]
    state: Path
    log: Path
    info: Mapping[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """What a client is started with."""
        kept = {name: value for name, value in os.environ.items() if name not in self.info["unset"]}
        return {**kept, **self.info["environment"], "TEST_BUCKET": BUCKET, "TEST_IMAGE": IMAGE}

    @property
    def port(self) -> int:
        """Of the front door."""
        port: int = self.info["front_port"]
        return port

    def client(self, script: str, *, timeout_seconds: float = 60) -> Any:
        """Run a Python program as a client; what it leaves in `result` comes back by way of JSON."""
        program = f"{script}\nimport json\nprint('RESULT ' + json.dumps(result))\n"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=self.environment,
            cwd=self.state,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0, done.stderr + done.stdout + self.log.read_text()[-4000:]
        return json.loads(results[-1].removeprefix("RESULT "))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


def command(state: Path, *arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "penstock_local", "--state", str(state), *arguments]


def start(directory: Path, *arguments: str) -> StandIn:
    """Start a stand-in below `directory` and wait until it serves."""
    images = directory / "images.toml"
    tables = [f'[images."{image}"]\npython = "{sys.executable}"\n' for image in (IMAGE, EXECUTOR_IMAGE)]
    images.write_text("".join(tables))
    state, log = directory / "state", directory / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(state, "--bucket", BUCKET, "--images", str(images), *arguments),
            stdout=output,
            stderr=output,
            text=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while not (state / "server.json").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return StandIn(process, state, log, json.loads((state / "server.json").read_text()))


class Rest:
    """google-auth's AuthorizedSession, told in so many words what clients read from their environment."""

    def __init__(self, stand_in: StandIn) -> None:
        environment = stand_in.info["environment"]
        credentials = service_account.Credentials.from_service_account_file(
            environment["GOOGLE_APPLICATION_CREDENTIALS"],
            scopes=["https://www.googleapis.com/auth/cloud-platform"],
        )
        direct = requests.Session()
        direct.trust_env = False
        self.session = AuthorizedSession(credentials, auth_request=Request(direct))
        self.session.trust_env = False
        self.session.proxies = {"https": environment["https_proxy"]}
        self.session.verify = environment["REQUESTS_CA_BUNDLE"]
        self.control_url = f"http://127.0.0.1:{stand_in.port}/penstock"

    def close(self) -> None:
        self.session.close()

    def call(
        self, method: str, path: str, body: Any = None, *, api: str = "us-central1-aiplatform", **query: Any
    ) -> Any:
        """One request to `https://{api}.googleapis.com`; raises requests.HTTPError."""
        url = f"https://{api}.googleapis.com/{path}"
        response = self.session.request(method, url, json=body, params=query)
        response.raise_for_status()
        return response.json()

    def refusal(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, str]:
        """The status code and message of a request that must fail."""
        with pytest.raises(requests.HTTPError) as caught:
            self.call(method, path, body, **query)
        response = caught.value.response
        return response.status_code, response.json()["error"]["message"]

    def control(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the stand-in's own API."""
        response = self.session.request(method, f"{self.control_url}/{path}", json=body)
        response.raise_for_status()
        return response.json()

    def wait_until(self, name: str, *states: str, seconds: float = 20) -> Any:
        """The job or pipeline `name` when its state ends in one of `states`."""
        deadline = time.monotonic() + seconds
        while True:
            resource = self.call("GET", f"v1/{name}")
            if resource["state"].rpartition("STATE_")[2] in states:
                return resource
            assert time.monotonic() < deadline, resource
            time.sleep(0.05)

    def lines(self, job_name: str, replica: str = "workerpool0-0") -> list[str]:
        """What a replica has printed, as Cloud Logging tells it."""
        told = self.call(
            "POST",
            "v2/entries:list",
            {
                "resourceNames": ["projects/demo"],
                "filter": f'resource.labels.job_id="{job_name.rpartition("/")[2]}" '
                f'AND resource.labels.task_name="{replica}"',
                "pageSize": 1000,
            },
            api="logging",
        )
        return [
            entry.get("textPayload") or json.dumps(entry["jsonPayload"]) for entry in told.get("entries", [])
        ]

    def first_line(self, job_name: str, replica: str = "workerpool0-0") -> str:
        """The first line of a replica as soon as there is one."""
        deadline = time.monotonic() + 20
        while not (lines := self.lines(job_name, replica)):
            assert time.monotonic() < deadline, f"{job_name}: {replica} has said nothing"
            time.sleep(0.05)
        return lines[0]

    def wait_for_line(self, job_name: str, replica: str, text: str) -> list[str]:
        """The lines of a replica as soon as one of them is `text`."""
        deadline = time.monotonic() + 20
        while text not in (lines := self.lines(job_name, replica)):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        return lines
