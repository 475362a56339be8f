"""A loopback block for each job, so that every replica has an address of its own and the ports of Vertex.

Linux answers on all of 127.0.0.0/8. Where only 127.0.0.1 can be bound (macOS), each replica gets a port instead.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field

REPLICA_PORT = 2222
"""The port in CLUSTER_SPEC on Vertex, as documented."""
OPEN_PORT = 3333
"""`open_ports` of CLUSTER_SPEC: as in the one dump of a real job that is public; the documentation has no such field."""
_RESERVATION_PORT = 2221
_ATTEMPTS = 64


@dataclass(slots=True)
class AddressBlock:
    """Addresses of one job, held against other stand-ins on this machine until `release`."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each replica, in order."""
    open_port: int
    _reservation: list[socket.socket] = field(default_factory=list)

    def release(self) -> None:
        """Give the block back."""
        for reserved in self._reservation:
            reserved.close()


def allocate(replica_count: int) -> AddressBlock:
    """A block that nothing on this machine uses now. Raises OSError when 64 random tries found none."""
    if not _can_bind("127.0.0.2"):
        return _ports_of_one_address(replica_count)
    if replica_count > 254:
        raise OSError(f"{replica_count} replicas do not fit into one loopback block; at most 254 do.")
    for _ in range(_ATTEMPTS):
        prefix = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
        reservation = _listener(f"{prefix}.1", _RESERVATION_PORT)
        if reservation is None:
            continue
        hosts = [f"{prefix}.{index + 1}" for index in range(replica_count)]
        if all(_can_bind(host, REPLICA_PORT) and _can_bind(host, OPEN_PORT) for host in hosts):
            return AddressBlock(tuple(f"{host}:{REPLICA_PORT}" for host in hosts), OPEN_PORT, [reservation])
        reservation.close()
    raise OSError("no free loopback block was found; is another program listening on 0.0.0.0:2222?")


def _ports_of_one_address(replica_count: int) -> AddressBlock:
    held = [_listener("127.0.0.1", 0) for _ in range(replica_count + 1)]
    ports = [listener.getsockname()[1] for listener in held if listener is not None]
    for listener in held:
        if listener is not None:
            listener.close()
    return AddressBlock(tuple(f"127.0.0.1:{port}" for port in ports[:-1]), ports[-1])


def _can_bind(host: str, port: int = 0) -> bool:
    listener = _listener(host, port)
    if listener is not None:
        listener.close()
    return listener is not None


def _listener(host: str, port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except OSError:
        listener.close()
        return None
    return listener
