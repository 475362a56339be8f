"""What a TLS ClientHello says before anything is encrypted: server name and ALPN protocols (RFC 8446, 6066, 7301)."""

from __future__ import annotations

from dataclasses import dataclass

_HANDSHAKE_RECORD, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ALPN = 0, 16


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The two extensions that decide where a connection goes."""

    server_name: str
    alpn: tuple[str, ...]


def parse_client_hello(record: bytes) -> ClientHello:
    """Read one TLS record. Anything that is not a ClientHello gives an empty one: the TLS server will object to it."""
    try:
        return _parse(record)
    except (IndexError, UnicodeDecodeError, ValueError):
        return ClientHello("", ())


def _parse(record: bytes) -> ClientHello:
    if record[0] != _HANDSHAKE_RECORD or record[5] != _CLIENT_HELLO:
        raise ValueError("not a ClientHello")
    position = 5 + 4 + 2 + 32  # record header, handshake header, version, random
    position += 1 + record[position]  # session id
    position += 2 + _uint16(record, position)  # cipher suites
    position += 1 + record[position]  # compression methods
    end = position + 2 + _uint16(record, position)
    position += 2
    server_name = ""
    alpn: tuple[str, ...] = ()
    while position + 4 <= end:
        kind, length = _uint16(record, position), _uint16(record, position + 2)
        body = record[position + 4 : position + 4 + length]
        if kind == _SERVER_NAME:
            server_name = body[5 : 5 + _uint16(body, 3)].decode("ascii")
        elif kind == _ALPN:
            alpn = _protocols(body[2:])
        position += 4 + length
    return ClientHello(server_name, alpn)


def _protocols(names: bytes) -> tuple[str, ...]:
    found, position = [], 0
    while position < len(names):
        length = names[position]
        found.append(names[position + 1 : position + 1 + length].decode("ascii"))
        position += 1 + length
    return tuple(found)


def _uint16(data: bytes, position: int) -> int:
    return int.from_bytes(data[position : position + 2], "big")
