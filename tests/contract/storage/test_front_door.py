"""Both ways of uploading find the stand-in, its certificate and its credentials by the environment alone."""

from __future__ import annotations

import pytest

from contract.vertex.stand_in import start


def test_every_way_follows_the_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    vertex = start(tmp_path_factory.mktemp("vertex"))
    try:
        result = vertex.client("""
from google.cloud import storage
from penstock_trainer.storage import GcsStorage, crc32c
from penstock_trainer.storage.transfers import ObstoreTransfer, SessionTransfer
client, data = storage.Client(), b"x" * 100_000
session = SessionTransfer(client)
for name, transfer in (("session", session), ("obstore", ObstoreTransfer(client, session, timeout_seconds=30))):
    transfer.put(
        "test-bucket",
        f"way/{name}",
        memoryview(data),
        crc32c=crc32c(data),
        if_generation_match=0,
        content_type="text/x",
    )
ours = GcsStorage(client)
result = [[info.uri, info.crc32c == crc32c(data)] for info in ours.list_objects("gs://test-bucket/way/")]
result.append(ours.read("gs://test-bucket/way/obstore") == data)
""")
    finally:
        assert vertex.stop() == 0, vertex.log.read_text()
    assert result == [["gs://test-bucket/way/obstore", True], ["gs://test-bucket/way/session", True], True]
