"""A server that takes and gives objects as fast as a socket does, so that what is measured is the client.

    python -m benchmarks.plain_http_server [--tls DIRECTORY]

It prints its endpoint on the first line and serves until its standard input is closed. Of Cloud Storage it speaks what
the clients in transfer_arms need: uploads in one request, resumable and multipart, over the JSON and the XML API,
descriptions, and ranged downloads. Of what is uploaded, size and CRC32C are kept; every download is of the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import ipaddress
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PAYLOAD_BYTES = 64 << 20
"""Of the object that every download reads."""
CA_FILE = "ca.pem"
GENERATION = 1_700_000_000_000_000

_PIECE_BYTES = 1 << 20
_EMPTY = (0, "AAAAAA==")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@contextmanager
def serving(tls: Path | None = None) -> Iterator[str]:
    """A server in a process of its own, so that its CPU time is not the client's; its endpoint.

    `tls`: a directory for a new certificate; clients trust `tls / CA_FILE`. Raises RuntimeError when it does not start.
    """
    argv = [sys.executable, "-m", "benchmarks.plain_http_server", *(["--tls", str(tls)] if tls else [])]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError(f"{' '.join(argv)} ended with {process.wait()}")
        yield endpoint
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class _Answer:
    headers: Mapping[str, str]
    body: bytes | memoryview = b""
    status: str = "200 OK"


class _Connection:
    """Requests of one client, one after another."""

    def __init__(
        self,
        connection: socket.socket,
        payload: memoryview,
        endpoint: str,
        objects: dict[str, tuple[int, str]],
    ) -> None:
        self._socket, self._payload, self._endpoint, self._objects = connection, payload, endpoint, objects
        self._file = connection.makefile("rb", buffering=_PIECE_BYTES)

    def serve(self) -> None:
        """Until the client closes."""
        try:
            while request := self._request():
                size, checksum = self._body(request.headers)
                answer = self._answer(request, size, checksum)
                length = answer.headers.get("content-length", str(len(answer.body)))
                head = {**answer.headers, "content-length": length}
                lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
                self._socket.sendall(f"HTTP/1.1 {answer.status}\r\n{lines}\r\n".encode())
                self._socket.sendall(answer.body)
        except (OSError, ValueError):
            pass  # the client went away
        finally:
            self._file.close()
            self._socket.close()

    def _request(self) -> _Request | None:
        line = self._file.readline().decode("latin-1").split()
        if not line:
            return None
        headers = {}
        while (field := self._file.readline().strip()) != b"":
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect") == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        url = urllib.parse.urlsplit(line[1])
        return _Request(
            line[0],
            urllib.parse.unquote(url.path),
            urllib.parse.parse_qs(url.query, keep_blank_values=True),
            headers,
        )

    def _body(self, headers: Mapping[str, str]) -> tuple[int, str]:
        """Its size and its CRC32C; of a multipart/related body those of the payload alone."""
        remaining = int(headers.get("content-length", 0))
        trailer = b""
        if headers.get("content-type", "").startswith("multipart/related"):
            remaining -= self._skip_metadata()
            trailer = b"\r\n" + self._delimiter + b"--"
        size, checksum = remaining - len(trailer), 0
        remaining = size
        while remaining:
            piece = self._file.read1(min(_PIECE_BYTES, remaining))
            if not piece:
                raise ConnectionError("the body ends early")
            checksum = google_crc32c.extend(checksum, piece)
            remaining -= len(piece)
        self._file.read(len(trailer))
        return size, base64.b64encode(checksum.to_bytes(4, "big")).decode()

    def _skip_metadata(self) -> int:
        """Bytes in front of the payload: two parts' heads and the first one's JSON."""
        self._delimiter = (line := self._file.readline()).strip()
        skipped, blank_lines = len(line), 0
        while blank_lines < 2:
            line = self._file.readline()
            skipped += len(line)
            blank_lines += not line.strip()
        return skipped

    def _answer(self, request: _Request, size: int, checksum: str) -> _Answer:
        query = request.query
        if request.method == "GET" and ("alt" in query or not request.path.startswith("/storage/")):
            return self._download(request)
        if query.get("uploadType") == ["resumable"] and "upload_id" not in query:
            return _Answer({"location": f"{self._endpoint}{request.path}?uploadType=resumable&upload_id=1"})
        if request.path.startswith(("/upload/", "/storage/")):
            name = query.get("name", [request.path.rpartition("/")[2]])[0]
            if request.method != "GET":
                self._objects[name] = (size, checksum)
            return _resource(name, *self._objects.get(name, _EMPTY))
        if "uploads" in query:
            return _xml("InitiateMultipartUploadResult", "<UploadId>1</UploadId>")
        if request.method == "POST":
            return _xml("CompleteMultipartUploadResult", "<ETag>&quot;1&quot;</ETag>")
        name = request.path.rpartition("/")[2]
        if request.method == "HEAD":
            size, checksum = self._objects.get(name, _EMPTY)
            return _Answer({**_object_headers(size, checksum), "content-length": str(size)})
        self._objects[name] = (size, checksum)
        return _Answer(_object_headers(size, checksum))

    def _download(self, request: _Request) -> _Answer:
        total = len(self._payload)
        match = _RANGE.fullmatch(request.headers.get("range", ""))
        first, last = (int(match[1]), int(match[2] or total - 1)) if match else (0, total - 1)
        headers = _object_headers(total, _EMPTY[1])
        headers["last-modified"] = "Wed, 01 Jan 2025 00:00:00 GMT"
        headers["content-type"] = "application/octet-stream"
        if match:
            headers["content-range"] = f"bytes {first}-{last}/{total}"
        status = "206 Partial Content" if match else "200 OK"
        return _Answer(headers, self._payload[first : last + 1], status)


def _resource(name: str, size: int, checksum: str) -> _Answer:
    described = {"name": name, "size": str(size), "generation": str(GENERATION), "crc32c": checksum}
    return _Answer({"content-type": "application/json"}, json.dumps(described).encode())


def _object_headers(size: int, checksum: str) -> dict[str, str]:
    return {
        "etag": '"1"',
        "x-goog-generation": str(GENERATION),
        "x-goog-hash": f"crc32c={checksum}",
        "x-goog-stored-content-length": str(size),
    }


def _xml(root: str, inner: str) -> _Answer:
    document = f"<?xml version='1.0'?><{root}><Bucket>b</Bucket><Key>k</Key>{inner}</{root}>"
    return _Answer(
        {"content-type": "application/xml", "x-goog-generation": str(GENERATION)}, document.encode()
    )


def _certificate(directory: Path) -> Path:
    """A new self-signed certificate for 127.0.0.1 with its key, in one file; CA_FILE is the certificate alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "plain_http_server")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / CA_FILE).write_bytes(public)
    chain = directory / "server.pem"
    chain.write_bytes(secret + public)
    return chain


def _serve(tls: Path | None) -> None:
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_certificate(tls))
    payload = memoryview(bytes(range(256)) * (PAYLOAD_BYTES // 256))
    objects: dict[str, tuple[int, str]] = {}
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        try:
            wrapped = context.wrap_socket(connection, server_side=True) if context else connection
        except OSError:
            return  # the client went away in the handshake
        _Connection(wrapped, payload, endpoint, objects).serve()

    threading.Thread(target=accept, daemon=True).start()
    print(endpoint, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tls", type=Path, help="directory for the certificate")
    _serve(parser.parse_args().tls)
