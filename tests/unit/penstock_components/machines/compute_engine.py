"""Compute Engine's machineTypes.aggregatedList and Google's token endpoint, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PROJECT = "a-project"
TOKEN = "ya29.a-token"


def machine_type(
    name: str, *, vcpus: int, memory_mb: int, gpus: tuple[str, int] | None = None
) -> dict[str, Any]:
    """A MachineType as the API writes it, with fields that nobody reads here."""
    accelerators = [{"guestAcceleratorType": gpus[0], "guestAcceleratorCount": gpus[1]}] if gpus else None
    told = {
        "kind": "compute#machineType",
        "id": "1000000",
        "creationTimestamp": "1969-12-31T16:00:00.000-08:00",
        "name": name,
        "description": f"{vcpus} vCPUs",
        "guestCpus": vcpus,
        "memoryMb": memory_mb,
        "maximumPersistentDisks": 128,
        "maximumPersistentDisksSizeGb": "263168",
        "isSharedCpu": False,
        "architecture": "X86_64",
    }
    return {**told, "accelerators": accelerators} if accelerators else told


def scope(zone: str, *types: dict[str, Any]) -> dict[str, Any]:
    """An entry of `items`: the zone's types, or the warning of a zone that has none on this page."""
    if types:
        listed = [
            {**each, "zone": zone, "selfLink": f"https://.../zones/{zone}/{each['name']}"} for each in types
        ]
        return {f"zones/{zone}": {"machineTypes": listed}}
    warning = {
        "code": "NO_RESULTS_ON_PAGE",
        "message": f"There are no results for scope 'zones/{zone}' on this page.",
        "data": [{"key": "scope", "value": f"zones/{zone}"}],
    }
    return {f"zones/{zone}": {"warning": warning}}


@contextmanager
def serving(*pages: dict[str, Any], status: int = 200) -> Iterator[str]:
    """The endpoint; each page names the next. Requests without the token or the page size are refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})

        def do_GET(self) -> None:
            url, asked = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
            if status != 200:
                error = {
                    "code": status,
                    "message": "Compute Engine API has not been used",
                    "status": "PERMISSION_DENIED",
                }
                return self.answer(status, {"error": error})
            assert url.path == f"/compute/v1/projects/{PROJECT}/aggregated/machineTypes"
            assert self.headers["Authorization"] == f"Bearer {TOKEN}"
            assert asked["maxResults"] == ["500"]
            index = int(asked.get("pageToken", ["page-0"])[0].removeprefix("page-"))
            more = {"nextPageToken": f"page-{index + 1}"} if index + 1 < len(pages) else {}
            return self.answer(200, {"kind": "compute#machineTypeAggregatedList", **pages[index], **more})

        def answer(self, code: int, body: dict[str, Any]) -> None:
            payload = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
