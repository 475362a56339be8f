from __future__ import annotations

import ssl

import pytest

from penstock_local.frontdoor.client_hello import alpn_protocols


def client_hello(protocols: list[str]) -> bytes:
    """What this machine's OpenSSL says first."""
    context = ssl.create_default_context()
    if protocols:
        context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="storage.googleapis.com")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("protocols", [[], ["h2"], ["h2", "http/1.1"], ["grpc-exp", "h2"]])
def test_the_protocols_offered_are_read_off_a_real_client_hello(protocols: list[str]) -> None:
    assert alpn_protocols(client_hello(protocols)) == tuple(protocols)


def test_every_cut_of_a_client_hello_offers_nothing_or_the_truth() -> None:
    whole = client_hello(["h2", "http/1.1"])
    told = {alpn_protocols(whole[:length]) for length in range(len(whole))}
    assert all(
        set(protocols) <= {"h2", "http/1.1", "http/1.", "http/1", "http/", "http", "htt", "ht", "h", ""}
        for protocols in told
    )


@pytest.mark.parametrize(
    "record", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x02\x02\x00", b"\x16" + b"\xff" * 600]
)
def test_what_is_no_client_hello_offers_nothing(record: bytes) -> None:
    assert alpn_protocols(record) == ()
