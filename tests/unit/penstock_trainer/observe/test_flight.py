"""What is read from torch's flight recorders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock_trainer.observe.communication import NcclTime, busy_share
from penstock_trainer.observe.flight import Collective, FlightRecord, collectives, pending, remember
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

MS = 1_000_000


def entry(number: int, *, group: int = 0, created_ms: float = 0.0, **more: Any) -> dict[str, Any]:
    """As torch/csrc/distributed/c10d/FlightRecorder.hpp writes it, format 2.10."""
    return {
        "pg_id": group,
        "process_group": [str(group), "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[65536]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "timeout_ms": 600_000,
        "time_created_ns": int(created_ms * MS),
        **more,
    }


def of_gloo(*entries: dict[str, Any], completed: int) -> dict[str, Any]:
    """gloo's recorder keeps no state but how far each group has come."""
    told = [{**each, "profiling_name": "gloo:all_reduce", "state": "scheduled"} for each in entries]
    return {
        "gloo": {"entries": told, "pg_status": {"0": {"last_completed_collective": str(completed)}}},
    }


def test_what_nccl_calls_unfinished_is_pending() -> None:
    dump = {"entries": [entry(1), entry(2, state="started"), entry(3, state="scheduled")]}
    (first,) = pending({"nccl": dump})
    assert (first.group, first.number) == ("nccl:0", 2)
    assert first.told(now_ns=600 * 1000 * MS) == "all_reduce #2 [65536] of nccl:0 since 600 s"


def test_of_gloo_what_follows_the_last_completed_is_pending() -> None:
    (first,) = pending(of_gloo(entry(7), entry(8), entry(9), completed=7))
    assert (first.group, first.number) == ("gloo:0", 8)


def test_each_group_has_one_place_to_wait_and_the_longest_wait_comes_first() -> None:
    dump = {
        "entries": [
            entry(5, group=1, created_ms=20, state="started"),
            entry(9, created_ms=10, state="started"),
            entry(10, created_ms=30, state="scheduled"),
        ]
    }
    assert [(wait.group, wait.number) for wait in pending({"nccl": dump})] == [("nccl:0", 9), ("nccl:1", 5)]


def test_sends_and_what_another_recorder_has_too_are_left_out() -> None:
    dump = {"entries": [entry(1, is_p2p=True), entry(2)]}
    assert [each.number for each in collectives({"nccl": dump, "gloo": dump})] == [2]


def test_the_records_are_asked_for_before_the_groups_are_made() -> None:
    environ: dict[str, str] = {}
    remember(300, environ)
    assert environ == {"TORCH_FR_BUFFER_SIZE": "300", "TORCH_NCCL_ENABLE_TIMING": "1"}
    environ = {}
    remember(0, environ)
    assert environ == {"TORCH_FR_BUFFER_SIZE": "0"}


def test_a_record_that_cannot_be_left_hides_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    root_uri = (tmp_path / "file").as_uri()
    with World.join(RankEnv(), timeout_seconds=20):
        dist.barrier()
        record = FlightRecord(root_uri=root_uri, attempt="a", rank=0, world_size=1, store=None)
        record.leave("lost")
    # Which collective is not said: the recorder is the process's, and holds the groups of earlier tests too.
    assert re.search(r"rank 0 (was last|waits) in \w+ #\d+", caplog.text)
    assert "rank 0 could not leave its last collectives" in caplog.text


def timed(created_ms: float, duration_ms: float | None) -> Collective:
    return Collective(
        group="nccl:0",
        number=1,
        operation="all_reduce",
        sizes=(),
        created_ns=int(created_ms * MS),
        timeout_ms=600_000,
        duration_ms=duration_ms,
        is_pending=duration_ms is None,
    )


def test_the_share_of_kernels_is_of_the_time_that_they_span() -> None:
    # From 0 to 100 ms: 20 and 30 ms; the last one's end is not known to lie within.
    assert busy_share([timed(0, 20), timed(50, 30), timed(100, 40)], since_ns=0) == pytest.approx(0.5)


def test_kernels_before_the_last_reading_are_not_counted_again() -> None:
    told = [timed(0, 90), timed(100, 10), timed(200, 10)]
    assert busy_share(told, since_ns=50 * MS) == pytest.approx(0.1)


@pytest.mark.parametrize("told", [[], [timed(0, 5)], [timed(0, None), timed(10, None)]])
def test_without_two_kernels_that_ended_no_share_is_known(told: list[Collective]) -> None:
    assert busy_share(told, since_ns=0) is None


def test_the_recorder_is_not_read_more_often_than_is_cheap() -> None:
    reader = NcclTime()
    assert reader.share(list) is None  # of nothing
    assert reader.share(lambda: pytest.fail("read again at once")) is None
