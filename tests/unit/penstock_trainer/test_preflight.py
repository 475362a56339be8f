"""What the pre-flight makes of what the ranks measured and told."""

from __future__ import annotations

import pytest

from penstock_trainer.errors import PreflightError
from penstock_trainer.preflight import (
    AllReduce,
    Answer,
    ClockSkew,
    Link,
    NodeFacts,
    check,
    check_versions,
    clock_skew_of,
    differing_devices,
    place_missing,
    skewed_clocks,
    slow_links,
)
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World


def nodes(count: int, **more: list[str]) -> list[NodeFacts]:
    """Nodes a, b, c, ... that are alike but for the fields of `more`, by node."""
    return [
        NodeFacts(
            **{
                "hostname": f"host-{'abcdefgh'[node]}",
                "torch_version": "2.13.0",
                "penstock_version": "0.1.0",
                **{name: values[node] for name, values in more.items()},
            }
        )
        for node in range(count)
    ]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    reduce = AllReduce(num_bytes=64 * 10**6, world_size=4, seconds=0.008)
    assert reduce.algorithm_gb_per_s == pytest.approx(8.0)
    assert reduce.bus_gb_per_s == pytest.approx(8.0 * 2 * 3 / 4)


def test_skew_is_read_at_the_barrier_that_was_the_shortest_on_every_node() -> None:
    true_skew = [0.0, 2.5, -0.25]
    instants = [100.0, 200.0, 300.0]
    early, late = [[0.3, 0.0, 0.0], [0.001, 0.001, 0.001], [0.0, 0.2, 0.0]], 0.001
    readings = [
        [
            (instant + skew - early[barrier][node], instant + skew + late)
            for barrier, instant in enumerate(instants)
        ]
        for node, skew in enumerate(true_skew)
    ]
    found = clock_skew_of(readings)
    assert found.seconds == pytest.approx(true_skew)
    assert found.uncertainty_seconds == pytest.approx(0.002)
    assert found.spread_seconds == pytest.approx(2.75)


def test_a_clock_that_is_surely_off_is_named() -> None:
    skew = ClockSkew(seconds=(0.0, 0.01, -3.0, 1.2), uncertainty_seconds=0.3)
    [told] = skewed_clocks(skew, nodes(4), max_seconds=1.0)
    assert told.startswith("the clock of node 2 (host-c) is -3.005 s off the others'")


def test_a_clock_that_may_be_right_is_not_named() -> None:
    skew = ClockSkew(seconds=(0.0, 1.2, 0.0), uncertainty_seconds=0.3)
    assert skewed_clocks(skew, nodes(3), max_seconds=1.0) == []


def test_a_slow_link_is_named_from_end_to_end() -> None:
    rates = [3.0, 1.2, 2.9, 3.1]
    links = [Link(source=(node - 1) % 4, target=node, gb_per_s=rate) for node, rate in enumerate(rates)]
    [told] = slow_links(links, nodes(4))
    assert told == ("the link from node 0 (host-a) to node 1 (host-b) carries 1.2 GB/s, the median link 2.95")


@pytest.mark.parametrize("rates", [(), (3.0, 1.1), (3.0, 1.5, 3.0)])
def test_links_within_half_of_the_median_are_not_named(rates: tuple[float, ...]) -> None:
    links = [Link(source=0, target=node, gb_per_s=rate) for node, rate in enumerate(rates)]
    assert slow_links(links, nodes(3)) == []


def test_versions_that_differ_are_told_with_their_nodes() -> None:
    found = nodes(3, torch_version=["2.12.0", "2.13.0", "2.13.0"], driver_version=["580.1", "580.1", ""])
    with pytest.raises(PreflightError) as caught:
        check_versions(found)
    assert str(caught.value).startswith(
        "the nodes differ in torch: 2.13.0 on node 1 (host-b) and node 2 (host-c), 2.12.0 on node 0 (host-a); "
        "driver: 580.1 on node 0 (host-a) and node 1 (host-b), none on node 2 (host-c)."
    )


def test_equal_versions_pass_and_devices_that_differ_are_a_warning() -> None:
    found = nodes(2, device_name=["NVIDIA H100", "NVIDIA H200"])
    check_versions(found)
    assert differing_devices(found) == [
        "the nodes differ in device: NVIDIA H100 on node 0 (host-a), NVIDIA H200 on node 1 (host-b)"
    ]
    assert differing_devices(nodes(2)) == []


def test_a_missing_rank_has_the_host_of_its_node() -> None:
    first, second = nodes(2)
    present = {
        1: Answer(local_rank=1, local_world_size=2, facts=first),
        2: Answer(local_rank=0, local_world_size=2, facts=second),
    }
    assert place_missing([0, 3], present) == "rank 0 on host-a, rank 3 on host-b"
    assert place_missing([2, 3], {1: present[1]}) == "rank 2 (nor of its node), rank 3 (nor of its node)"


def test_a_single_rank_has_nothing_to_measure() -> None:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=10) as world:
        found = check(world)
        assert (found.all_reduces, found.clock_skew, found.links, found.warnings) == ((), None, (), ())
        assert found.nodes == (NodeFacts.of(world.device),)
