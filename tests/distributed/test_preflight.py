"""The pre-flight of three real gloo ranks that take themselves for two nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from penstock_trainer.testing import RankRun, run_ranks


def ranks_of(function: str) -> tuple[list[Any], list[RankRun]]:
    """What each rank told, None for one that told nothing; the ranks."""
    ranks = run_ranks("distributed.preflight_ranks", [function], world_size=3, timeout_seconds=60.0)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], ranks
    return [json.loads(rank.stdout) if rank.stdout else None for rank in ranks], ranks


def test_every_rank_finds_the_same_on_nodes_that_are_well() -> None:
    told, ranks = ranks_of("runs")

    seconds = [rank.pop("seconds") for rank in told]
    assert told[0] == told[1] == told[2]
    assert [node["hostname"] for node in told[0]["nodes"]] == ["host-0", "host-1"]
    assert [node["torch_version"] for node in told[0]["nodes"]] == [torch.__version__] * 2
    assert [reduce["num_bytes"] for reduce in told[0]["all_reduces"]] == [2**16, 2**20]
    assert all(reduce["world_size"] == 3 for reduce in told[0]["all_reduces"])
    assert all(0 < reduce["seconds"] < 1 for reduce in told[0]["all_reduces"])
    # One machine has one clock: the skew that is seen is what the method cannot tell.
    skew = told[0]["clock_skew"]
    assert abs(skew["seconds"][1]) <= skew["uncertainty_seconds"]
    assert [(link["source"], link["target"]) for link in told[0]["links"]] == [(1, 0), (0, 1)]
    assert max(seconds) < 5  # 0.1 on two idle cores; it must not be felt at the start of a run
    assert "preflight: all-reduce 1 MiB over 3 ranks" in ranks[0].stderr
    assert "preflight:" not in ranks[1].stderr + ranks[2].stderr


def test_a_node_with_another_version_is_named_on_every_rank() -> None:
    told, _ = ranks_of("other_version_on_node_1")
    assert told == [{"error": told[0]["error"], "lost_peer": False}] * 3
    assert "torch: 2.13.0 on node 0 (host-0), 2.12.0 on node 1 (host-1)" in told[0]["error"]


@pytest.mark.parametrize(
    ("function", "hung", "named"),
    [
        ("rank_1_never_comes", 1, "after 3 s without an answer of rank 1 on host-0."),
        ("rank_2_answers_and_hangs", 2, "rank 2 on host-1 cannot be reached within 3 s"),
    ],
)
def test_a_rank_that_hangs_is_named_and_is_a_lost_peer(function: str, hung: int, named: str) -> None:
    told, _ = ranks_of(function)
    assert told[hung] is None
    others = [rank for rank in told if rank is not None]
    assert others == [{"error": others[0]["error"], "lost_peer": True}] * 2
    assert named in others[0]["error"]
