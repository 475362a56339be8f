"""One stand-in for the whole folder: it takes 2 s to start, and no test needs it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.vertex.stand_in import Rest, StandIn, start


@pytest.fixture(scope="session")
def vertex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    stand_in = start(tmp_path_factory.mktemp("vertex"))
    yield stand_in
    assert stand_in.stop() == 0, stand_in.log.read_text()
    assert "Traceback" not in stand_in.log.read_text(), stand_in.log.read_text()


@pytest.fixture(scope="session")
def rest(vertex: StandIn) -> Iterator[Rest]:
    client = Rest(vertex)
    yield client
    client.close()
