from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from penstock_local.jobs import addresses
from penstock_local.jobs.addresses import OPEN_PORT, REPLICA_PORT, AddressBlock, allocate


def split(block: AddressBlock) -> list[tuple[str, int]]:
    return [(host, int(port)) for host, _, port in (endpoint.rpartition(":") for endpoint in block.endpoints)]


def test_two_jobs_at_once_get_blocks_of_their_own_with_the_ports_of_vertex() -> None:
    first, second = allocate(3), allocate(2)
    try:
        hosts = [host for host, _ in (*split(first), *split(second))]
        assert len(set(hosts)) == 5
        assert {host.rpartition(".")[0] for host in hosts[:3]}.isdisjoint(
            host.rpartition(".")[0] for host in hosts[3:]
        )
        assert {port for _, port in (*split(first), *split(second))} == {REPLICA_PORT}
        with ExitStack() as stack:
            for host in hosts:  # every replica can serve on both ports at once
                for port in (REPLICA_PORT, OPEN_PORT):
                    stack.enter_context(closing(socket.create_server((host, port))))
    finally:
        first.release()
        second.release()


def test_a_block_is_held_until_it_is_released() -> None:
    block = allocate(1)
    prefix = split(block)[0][0].rpartition(".")[0]
    assert not addresses._can_bind(f"{prefix}.1", addresses._RESERVATION_PORT)
    block.release()
    assert addresses._can_bind(f"{prefix}.1", addresses._RESERVATION_PORT)


def test_where_only_one_address_can_be_bound_each_replica_has_a_port() -> None:
    block = addresses._ports_of_one_address(3)
    endpoints = split(block)
    assert {host for host, _ in endpoints} == {"127.0.0.1"}
    assert len({*(port for _, port in endpoints), block.open_port}) == 4


def test_a_job_larger_than_a_block_is_told_so() -> None:
    with pytest.raises(OSError, match="255 replicas do not fit into one loopback block; at most 254 do"):
        allocate(255)
