"""What a TLS ClientHello says before anything is encrypted: the ALPN protocols (RFC 8446, RFC 7301)."""

from __future__ import annotations

_HANDSHAKE_RECORD, _CLIENT_HELLO = 22, 1
_ALPN = 16


def alpn_protocols(record: bytes) -> tuple[str, ...]:
    """The protocols that the ClientHello in one TLS record offers.

    Anything that is not a ClientHello offers none: the TLS server will object to it.
    """
    try:
        return _protocols(_alpn_extension(record)[2:])
    except (IndexError, UnicodeDecodeError):
        return ()


def _alpn_extension(record: bytes) -> bytes:
    """Its body, empty when there is none. Raises IndexError for a record that is cut short."""
    if record[0] != _HANDSHAKE_RECORD or record[5] != _CLIENT_HELLO:
        return b""
    position = 5 + 4 + 2 + 32  # record header, handshake header, version, random
    position += 1 + record[position]  # session id
    position += 2 + _uint16(record, position)  # cipher suites
    position += 1 + record[position]  # compression methods
    end = position + 2 + _uint16(record, position)
    position += 2
    while position + 4 <= end:
        kind, length = _uint16(record, position), _uint16(record, position + 2)
        if kind == _ALPN:
            return record[position + 4 : position + 4 + length]
        position += 4 + length
    return b""


def _protocols(names: bytes) -> tuple[str, ...]:
    found, position = [], 0
    while position < len(names):
        length = names[position]
        found.append(names[position + 1 : position + 1 + length].decode("ascii"))
        position += 1 + length
    return tuple(found)


def _uint16(data: bytes, position: int) -> int:
    return data[position] << 8 | data[position + 1]
