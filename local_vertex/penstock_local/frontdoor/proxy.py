"""The front door: one loopback port that takes CONNECT for the hosts served here and refuses every other host.

A client's TLS goes through unopened to the server that speaks its protocol; the ALPN of its ClientHello tells gRPC
from HTTP/1.1. A request that is not CONNECT goes to the control server.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import socket
from dataclasses import dataclass, field

from penstock_local.frontdoor.client_hello import alpn_protocols

logger = logging.getLogger(__name__)

SERVED_HOSTS = (
    "aiplatform.googleapis.com",
    "*-aiplatform.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "iamcredentials.googleapis.com",
    "logging.googleapis.com",
    "storage.googleapis.com",
)
_HEAD_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 18


def is_served(host: str) -> bool:
    """Whether requests for `host` are answered here."""
    return any(fnmatch.fnmatchcase(host.lower(), pattern) for pattern in SERVED_HOSTS)


@dataclass(frozen=True, slots=True)
class Backends:
    """Loopback ports behind the front door."""

    grpc_port: int
    """TLS, HTTP/2."""
    https_port: int
    """TLS, HTTP/1.1."""
    control_port: int
    """Plain HTTP/1.1: tokens and control."""


@dataclass
class FrontDoor:
    """Accepts connections on 127.0.0.1 and splices each to its back end; remembers what it refused."""

    backends: Backends
    refused: list[str] = field(default_factory=list)
    """HOST:PORT of each refused CONNECT and the URL of each refused plain proxy request, in order."""
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on a socket that listens on 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_CHUNK_BYTES)

    async def stop(self) -> None:
        """Stop listening and cut what is open: clients keep idle connections for as long as the servers let them."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._handle(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            if not self._accepts(head):
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
            elif head.startswith(b"CONNECT "):
                await self._tunnel(reader, writer)
            else:
                await _splice(reader, writer, self.backends.control_port, head)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            logger.debug("connection ended: %r", exc)
        finally:
            writer.close()

    def _accepts(self, head: bytes) -> bool:
        """Whether the request's target is served here; a refusal is noted down."""
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target = rest.partition(" ")[0]
        host, _, port = target.rpartition(":")
        served = is_served(host) and port == "443" if method == "CONNECT" else target.startswith("/")
        if not served:
            self.refused.append(target)
            logger.warning("refused a request to %s: nothing leaves this machine", target)
        return served

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await writer.drain()
        async with asyncio.timeout(_HEAD_TIMEOUT_SECONDS):
            hello_bytes = await _read_client_hello(reader)
        await _splice(reader, writer, self._port_for(alpn_protocols(hello_bytes)), hello_bytes)

    def _port_for(self, alpn: tuple[str, ...]) -> int:
        if alpn and "http/1.1" not in alpn:
            return self.backends.grpc_port
        return self.backends.https_port


async def _read_client_hello(reader: asyncio.StreamReader) -> bytes:
    """The first TLS record. Clients of today send the whole ClientHello in it."""
    header = await reader.readexactly(5)
    return header + await reader.readexactly(int.from_bytes(header[3:5], "big"))


async def _splice(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, first_bytes: bytes
) -> None:
    back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
    try:
        back_writer.write(first_bytes)
        await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
    finally:
        back_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until end of file, then say so to the other side, so that half-closed connections work."""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()  # ends the pump of the other direction too
