"""Clients that move the same bytes to and from Cloud Storage, and a plain socket as the floor.

    python -m benchmarks.transfer_arms upload|download ARM ENDPOINT [MIB]

runs one arm in this process, once to warm up and once measured, and prints {"cpu_seconds", "wall_seconds", "bytes"}.
The time of all its threads counts, that of the server (plain_http_server) does not. A buffer goes up as objects of
OBJECT_BYTES, AT_ONCE of them at a time, as a checkpoint's chunks do, and comes down in ranges of that size.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import obstore
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from obstore.store import GCSStore

from benchmarks.plain_http_server import CA_FILE, PAYLOAD_BYTES
from penstock_trainer.storage import Buffer, GcsStorage, crc32c

OBJECT_BYTES = 64 << 20
AT_ONCE = 4
BUCKET = "bench"

Put = Callable[[str, memoryview], object]
"""Object's name and bytes."""
Get = Callable[[str, int, int], Buffer]
"""Object's name, first byte and length."""
Upload = Callable[[memoryview], None]
Download = Callable[[int], None]
"""Of so many bytes."""


def upload_arms(endpoint: str) -> dict[str, Callable[[], Upload]]:
    """By name: makes the client, and gives what uploads a buffer with it. Blocks until all of it has been answered."""
    puts: dict[str, Callable[[str], Put]] = {
        "penstock": _penstock_put,
        "blob, from bytes": _blob_put,
        "blob, from a file": _blob_file_put,
        "session": _session_put,
        "obstore": lambda endpoint: _obstore_put(endpoint, multipart=False, copy=False),
        "obstore, read back": _obstore_read_back_put,
        "obstore, from bytes": lambda endpoint: _obstore_put(endpoint, multipart=False, copy=True),
        "obstore, multipart": lambda endpoint: _obstore_put(endpoint, multipart=True, copy=False),
        "socket": _socket_put,
    }
    return {name: _upload(make, endpoint) for name, make in puts.items()}


def download_arms(endpoint: str) -> dict[str, Callable[[], Download]]:
    """By name: makes the client, and gives what downloads so many bytes with it, in ranges, and drops them."""
    gets: dict[str, Callable[[str], Get]] = {
        "penstock": _penstock_get,
        "blob": _blob_get,
        "session": _session_get,
        "obstore": _obstore_get,
        "obstore, ranges": _obstore_get_ranges,
        "socket": _socket_get,
    }
    return {name: _download(make, endpoint) for name, make in gets.items()}


def _upload(make: Callable[[str], Put], endpoint: str) -> Callable[[], Upload]:
    def start() -> Upload:
        put, pool = make(endpoint), ThreadPoolExecutor(AT_ONCE)

        def upload(data: memoryview) -> None:
            starts = range(0, len(data), OBJECT_BYTES)
            list(pool.map(lambda start: put(f"object-{start}", data[start : start + OBJECT_BYTES]), starts))

        return upload

    return start


def _download(make: Callable[[str], Get], endpoint: str) -> Callable[[], Download]:
    def start() -> Download:
        get, pool = make(endpoint), ThreadPoolExecutor(AT_ONCE)

        def download(size: int) -> None:
            objects = [min(PAYLOAD_BYTES, size - start) for start in range(0, size, PAYLOAD_BYTES)]
            assert sum(pool.map(lambda length: len(get("object", 0, length)), objects)) == size

        return download

    return start


def client_of(endpoint: str) -> storage.Client:
    """Google's client, without credentials."""
    options = {"api_endpoint": endpoint}
    return storage.Client(project="bench", credentials=AnonymousCredentials(), client_options=options)


def store_of(endpoint: str) -> GCSStore:
    """obstore's client of one bucket, without credentials that are checked."""
    bundle = os.environ.get("SSL_CERT_FILE")
    return GCSStore(
        BUCKET,
        config={"base_url": endpoint, "bearer_token": "unchecked"},
        client_options={
            "allow_http": True,
            "timeout": timedelta(minutes=5),
            **({"root_certificate": Path(bundle).read_bytes()} if bundle else {}),
        },
    )


def _penstock_put(endpoint: str) -> Put:
    ours = GcsStorage(client_of(endpoint))
    return lambda name, data: ours.write(f"gs://{BUCKET}/{name}", data)


def _penstock_get(endpoint: str) -> Get:
    ours = GcsStorage(client_of(endpoint))
    return lambda name, start, length: ours.read(f"gs://{BUCKET}/{name}", start=start, length=length)


def _blob_put(endpoint: str) -> Put:
    bucket = client_of(endpoint).bucket(BUCKET)
    return lambda name, data: bucket.blob(name).upload_from_string(bytes(data))


def _blob_file_put(endpoint: str) -> Put:
    bucket = client_of(endpoint).bucket(BUCKET)
    return lambda name, data: bucket.blob(name).upload_from_file(io.BytesIO(data), size=len(data))


def _blob_get(endpoint: str) -> Get:
    bucket = client_of(endpoint).bucket(BUCKET)
    return lambda name, start, length: bucket.blob(name).download_as_bytes(
        start=start, end=start + length - 1
    )


def _session_put(endpoint: str) -> Put:
    """The HTTP session of Google's client, one request: the buffer goes to the socket as it is."""
    session = client_of(endpoint)._http

    def put(name: str, data: memoryview) -> None:
        url = f"{endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        session.post(url, data=data, headers={"x-goog-hash": f"crc32c={crc32c(data)}"}).raise_for_status()

    return put


def _session_get(endpoint: str) -> Get:
    session = client_of(endpoint)._http

    def get(name: str, start: int, length: int) -> bytes:
        url = f"{endpoint}/download/storage/v1/b/{BUCKET}/o/{name}?alt=media"
        headers = {"range": f"bytes={start}-{start + length - 1}"}
        with session.get(url, headers=headers, stream=True) as response:
            data: bytes = response.raw.read(decode_content=False)
        return data

    return get


def _obstore_put(endpoint: str, *, multipart: bool, copy: bool) -> Put:
    store = store_of(endpoint)

    def put(name: str, data: memoryview) -> None:
        crc32c(data)  # obstore sends none: whoever wants to know compares it with what the server tells
        obstore.put(store, name, bytes(data) if copy else data, use_multipart=multipart)

    return put


def _obstore_read_back_put(endpoint: str) -> Put:
    """With what obstore leaves to its caller: asking the server which CRC32C it has received."""
    put, bucket = _obstore_put(endpoint, multipart=False, copy=False), client_of(endpoint).bucket(BUCKET)

    def checked(name: str, data: memoryview) -> None:
        put(name, data)
        assert bucket.get_blob(name) is not None

    return checked


def _obstore_get(endpoint: str) -> Get:
    store = store_of(endpoint)
    return lambda name, start, length: memoryview(obstore.get_range(store, name, start=start, length=length))


def _obstore_get_ranges(endpoint: str) -> Get:
    store = store_of(endpoint)

    def get(name: str, start: int, length: int) -> memoryview:
        [found] = obstore.get_ranges(store, name, starts=[start], lengths=[length])
        return memoryview(found)

    return get


class _Sockets:
    """One connection for each object under way."""

    def __init__(self, endpoint: str) -> None:
        url = urllib.parse.urlsplit(endpoint)
        self._address = (url.hostname or "", url.port or 0)
        self._context = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: list[socket.socket] = []

    def exchange(self, head: str, body: memoryview | None = None, reply: memoryview | None = None) -> None:
        """Send head and body, and read what is answered into `reply`; without it, the answer's head alone."""
        connection = self._idle.pop() if self._idle else self._connect()
        connection.sendall(f"{head} HTTP/1.1\r\nhost: h\r\n".encode())
        connection.sendall(f"content-length: {len(body) if body else 0}\r\n\r\n".encode())
        if body is not None:
            connection.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(4096)
        if reply is None:
            # The server answers with a description in JSON, whose length stands in the head.
            length = int(answer.lower().partition(b"content-length:")[2].split()[0])
            reply = memoryview(bytearray(length))
        begun = answer.partition(b"\r\n\r\n")[2]
        reply[: len(begun)] = begun
        received = len(begun)
        while received < len(reply):
            received += connection.recv_into(reply[received:])
        self._idle.append(connection)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = self._address[0]
        return self._context.wrap_socket(connection, server_hostname=host) if self._context else connection


def _socket_put(endpoint: str) -> Put:
    sockets = _Sockets(endpoint)

    def put(name: str, data: memoryview) -> None:
        crc32c(data)
        sockets.exchange(f"POST /upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", body=data)

    return put


def _socket_get(endpoint: str) -> Get:
    sockets = _Sockets(endpoint)

    def get(name: str, start: int, length: int) -> memoryview:
        reply = memoryview(bytearray(length))
        sockets.exchange(
            f"GET /{BUCKET}/{name} HTTP/1.1\r\nrange: bytes={start}-{start + length - 1}\r\nx:", reply=reply
        )
        return reply

    return get


def host_buffer(size: int) -> memoryview:
    """Memory as a checkpoint's host buffer is made: a mapped memfd, touched."""
    descriptor = os.memfd_create("transfer_arms")
    os.ftruncate(descriptor, size)
    data = memoryview(mmap.mmap(descriptor, size))
    os.close(descriptor)
    piece = os.urandom(1 << 20)
    for start in range(0, size, len(piece)):
        data[start : start + len(piece)] = piece[: size - start]
    return data


def measured(
    direction: str, arm: str, endpoint: str, size: int, *, tls: Path | None = None
) -> Mapping[str, float]:
    """What one arm costs in a process of its own; see this module. Raises RuntimeError when it fails, with its words."""
    argv = [sys.executable, "-m", "benchmarks.transfer_arms", direction, arm, endpoint, str(size >> 20)]
    trusted = {name: str(tls / CA_FILE) for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")} if tls else {}
    done = subprocess.run(argv, env={**os.environ, **trusted}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: Mapping[str, float] = json.loads(done.stdout)
    return found


def _rounds(direction: str, arm: str, endpoint: str, size: int) -> Iterator[None]:
    if direction == "upload":
        upload, data = upload_arms(endpoint)[arm](), host_buffer(size)
        while True:
            upload(data)
            yield
    download = download_arms(endpoint)[arm]()
    while True:
        download(size)
        yield


def main(argv: list[str]) -> None:
    """See the module."""
    direction, arm, endpoint = argv[:3]
    size = int(argv[3] if len(argv) > 3 else 512) << 20
    rounds = _rounds(direction, arm, endpoint, size)
    next(rounds)
    cpu, wall = time.process_time(), time.perf_counter()
    next(rounds)
    spent = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    print(json.dumps({**spent, "bytes": size}))


if __name__ == "__main__":
    main(sys.argv[1:])
