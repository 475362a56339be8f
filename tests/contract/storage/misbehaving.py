"""A server in front of the stand-in that hands requests on, except for those that it was told to spoil."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Kind = Literal[
    "refuse",  # answered with `status`, not handed on
    "reset",  # the connection is reset in the middle of the request's body
    "lose answer",  # handed on, and closed without an answer
    "truncate",  # half of the answer's body, and closed
    "reset answer",  # half of the answer's body, and reset
    "flip",  # a bit of the request's body is changed on the way
    "flip answer",  # a bit of the answer's body is changed on the way
    "slow",  # handed on, and answered `seconds` later
    "part of a rewrite",  # answered as a copy that needs another call
]


@dataclass(slots=True)
class Fault:
    """What happens to the next requests of a method."""

    kind: Kind
    method: str
    times: int = 1
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class Misbehaving:
    """Where clients connect to, what is to go wrong, and what they have asked for."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Method and target of each, the spoiled ones too."""
    agents: list[str] = field(default_factory=list)
    """Of each, how the client calls itself."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def spoil(self, kind: Kind, method: str, **how: object) -> None:
        """Add a fault; `times=0` is for ever."""
        self.faults.append(Fault(kind, method, **how))  # type: ignore[arg-type]  # a Fault's fields

    def next_fault(self, method: str) -> Fault | None:
        """The one for this request, used up when it was its last time."""
        with self.lock:
            fault = next((fault for fault in self.faults if fault.method == method), None)
            if fault is not None and fault.times:
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
            return fault


@contextmanager
def misbehaving(upstream: str) -> Iterator[Misbehaving]:
    """A server in front of `upstream`, well-behaved until it is told otherwise."""
    state = Misbehaving(url="")
    address = urllib.parse.urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            state.requests.append(f"{self.command} {self.path}")
            state.agents.append(self.headers.get("user-agent", ""))
            fault = state.next_fault(self.command)
            kind = fault.kind if fault else None
            length = int(self.headers.get("content-length", 0))
            if kind == "reset":
                self.rfile.read(length // 2)
                self.reset()
                return
            body = self.rfile.read(length)
            if fault and kind == "refuse":
                self.answer(fault.status, {**fault.headers}, b"<Error><Code>Injected</Code></Error>")
                return
            if kind == "part of a rewrite":
                told = {"done": False, "rewriteToken": "go-on", "totalBytesRewritten": "1", "objectSize": "7"}
                self.answer(200, {"content-type": "application/json"}, json.dumps(told).encode())
                return
            status, headers, answered = self.forward(flipped(body) if kind == "flip" else body)
            if fault and kind == "slow":
                time.sleep(fault.seconds)
            if kind == "lose answer":
                self.close_connection = True
                return
            self.answer(status, headers, flipped(answered) if kind == "flip answer" else answered, kind)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_any

        def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(address)
            target = self.path.replace("&rewriteToken=go-on", "").replace("rewriteToken=go-on&", "")
            connection.putrequest(self.command, target, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() != "connection"}
            found = answer.status, headers, answer.read()
            connection.close()
            return found

        def answer(self, status: int, headers: dict[str, str], body: bytes, kind: Kind | None = None) -> None:
            self.send_response_only(status)
            if self.command != "HEAD":
                headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
                headers["content-length"] = str(len(body))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            cut = kind in ("truncate", "reset answer")
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True
            if kind == "reset answer":
                self.reset()

        def reset(self) -> None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def handle(self) -> None:
            with suppress(OSError):  # the client, or `reset`, has closed it
                super().handle()

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def flipped(body: bytes) -> bytes:
    """With one bit in the middle changed."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
