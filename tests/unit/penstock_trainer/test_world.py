"""Which errors another try can mend, and that one rank's error is every rank's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock_trainer.errors import TrainerError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.testing import run_ranks
from penstock_trainer.world import World, is_lost_peer


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
        ),
        RuntimeError(
            "Gloo connectFullMesh failed with [...] timed out connecting: SO_ERROR: Connection refused"
        ),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"),
        dist.DistStoreError("wait timeout after 60000ms"),
    ],
)
def test_a_lost_peer_is_worth_another_try_also_as_a_cause(error: Exception) -> None:
    assert is_lost_peer(error)
    wrapped = TrainerError("saving failed")
    wrapped.__cause__ = error
    assert is_lost_peer(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Size mismatch"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_an_error_of_our_own_is_not(error: Exception) -> None:
    assert not is_lost_peer(error)


def test_work_of_one_rank_ends_on_all_ranks_alike(tmp_path: Path) -> None:
    ranks = run_ranks("distributed.world_ranks", [], world_size=2, timeout_seconds=60.0)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first, second = (json.loads(rank.stdout) for rank in ranks)
    assert first["value"] == second["value"] == {"from": 0}
    assert first["gathered"] == second["gathered"] == [0, 10]
    assert first["primary"] == "ValueError: no\nsecond line"
    assert second["primary"] == "PeerError: rank 0 failed: ValueError: no"
    assert first["node"] == "OSError: disk full"
    assert second["node"] == "PeerError: rank 0 failed: OSError: disk full"
    assert (first["stops"], second["stops"]) == ([[False, False], [True, True]],) * 2


def test_a_lone_process_needs_no_store() -> None:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        assert world.gather("x") == ["x"]
        assert world.from_primary(lambda: 3) == 3
    assert not dist.is_initialized()
