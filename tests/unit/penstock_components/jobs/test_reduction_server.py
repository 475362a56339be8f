"""Reduction Server: sizes as Google's guide has them, and plain advice where the pool brings little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_components.jobs.all_reduce import (
    all_reduce_gain,
    break_even_step_gain,
    communication_gain,
    reducers_needed,
    ring_gain,
    step_gain,
    traffic_share,
)
from penstock_components.jobs.findings import Finding, JobSpecError
from penstock_components.jobs.messages import (
    ContainerSpec,
    MachineSpec,
    PythonPackageSpec,
    WorkerPoolSpec,
)
from penstock_components.jobs.reducer_sizing import sizing
from penstock_components.jobs.reduction_server import (
    BUCKET_CAP_MB,
    IMAGES,
    ReductionServer,
    advice,
    image_uri,
)
from penstock_components.jobs.topology import nodes
from penstock_components.machines.catalogue import MachineError
from penstock_trainer.contract.config import EngineConfig

PROGRAM = ContainerSpec(image_uri="trainer", command=("python", "-m", "trainer"))
V100 = MachineSpec(machine_type="n1-standard-16", accelerator_type="NVIDIA_TESLA_V100", accelerator_count=4)


def pools(
    num_nodes: int = 4, *, reducers: int = 13, machine: MachineSpec | str = "a2-highgpu-8g", **server: Any
) -> list[WorkerPoolSpec]:
    reduction_server = ReductionServer(replica_count=reducers, **server)
    return [*nodes(machine, num_nodes).pools(PROGRAM), reduction_server.pool("us-central1")]


def found(given: list[WorkerPoolSpec], **changes: str) -> list[Finding]:
    context = {"strategy": "ddp", "scheduling_strategy": "STANDARD", "location": "us-central1"}
    return list(advice(given, **(context | changes)))


def rules(given: list[WorkerPoolSpec], **changes: str) -> list[tuple[str, str, str]]:
    return [(each.severity, each.rule, each.path) for each in found(given, **changes)]


@pytest.mark.parametrize(
    ("machines", "needed"),
    [
        (["a2-highgpu-8g", "a2-ultragpu-8g", "a2-megagpu-16g"], [7, 13, 25, 50]),
        (["a2-highgpu-4g", "a2-ultragpu-4g", "g2-standard-48"], [4, 7, 13, 25]),
        (["a2-highgpu-2g", "a2-ultragpu-2g", V100, "g2-standard-24", "g2-standard-32"], [2, 4, 8, 16]),
        (["a2-highgpu-1g", "a2-ultragpu-1g"], [2, 3, 6, 12]),
        (["a3-highgpu-8g"], [63, 125, 250, 500]),
    ],
)
def test_reducers_needed_at_2_4_8_and_16_nodes(machines: list[MachineSpec | str], needed: list[int]) -> None:
    for machine in machines:
        sized = [sizing(pools(num_nodes, machine=machine)) for num_nodes in (2, 4, 8, 16)]
        assert [each.reducers_needed for each in sized if each is not None] == needed


@pytest.mark.parametrize(("num_nodes", "needed"), [(5, 16), (8, 25)])
def test_reducers_needed_are_those_of_googles_two_examples(num_nodes: int, needed: int) -> None:
    assert reducers_needed(nodes_gbps=num_nodes * 100, reducer_gbps=32) == needed


@pytest.mark.parametrize(("num_nodes", "gain"), [(2, 1.0), (4, 1.5), (8, 1.75), (16, 1.875)])
def test_the_gain_over_a_ring_is_2_n_minus_1_over_n(num_nodes: int, gain: float) -> None:
    assert ring_gain(num_nodes) == gain
    assert all_reduce_gain(num_nodes=num_nodes, nodes_gbps=100, reducers_gbps=1000) == gain


def test_two_reducers_for_four_a100_nodes_are_four_times_slower_than_a_ring() -> None:
    sized = sizing(pools(reducers=2))
    assert sized is not None
    assert sized.gain == pytest.approx(0.24)
    assert "0.24x as fast as a ring; 13 x n1-highcpu-16" in sized.told
    (finding,) = found(pools(reducers=2))
    assert (finding.severity, finding.path) == ("warning", "worker_pool_specs[2].replica_count")
    assert "64 of the nodes' 400 Gbit/s" in finding.reason
    assert finding.fix == "Set replica_count to 13."


@pytest.mark.parametrize(
    ("num_nodes", "reducers", "told"),
    [
        (2, 7, "at 2 nodes a Reduction Server brings nothing: a ring moves each byte 2(n-1)/n = 1.00 times"),
        (2, 1, "slower still, 0.16x"),
        (8, 24, "on 8 nodes up to 1.68x"),
        (4, 13, "on 4 nodes up to 1.50x on the all-reduce"),
    ],
)
def test_a_sizing_tells_what_the_pool_brings(num_nodes: int, reducers: int, told: str) -> None:
    sized = sizing(pools(num_nodes, reducers=reducers))
    assert sized is not None
    assert told in sized.told


def test_where_a_bandwidth_is_not_known_no_size_is_claimed() -> None:
    node = MachineSpec(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1)
    given = pools(machine=node, reducers=1)
    sized = sizing(given)
    assert sized is not None
    assert (sized.reducers_needed, sized.gain) == (None, None)
    assert "which the catalogue does not know" in sized.told
    assert found(given) == []


def test_enough_reducers_behind_ddp_need_no_advice() -> None:
    assert found(pools()) == []
    assert found(pools(8, reducers=25), strategy="") == []


@pytest.mark.parametrize("strategy", ["zero3", "fsdp-full"])
def test_engines_without_all_reduce_gain_nothing(strategy: str) -> None:
    (finding,) = found(pools(), strategy=strategy)
    assert (finding.severity, finding.rule) == ("warning", "reducers-bring-nothing")
    assert "reduce-scatters" in finding.reason


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_1_and_2_gain_on_two_thirds_of_their_traffic(strategy: str) -> None:
    (finding,) = found(pools(), strategy=strategy)
    assert "two thirds" in finding.reason
    assert "at most 1.29x" in finding.reason  # 1 / (1/3 + 2/3 / 1.5)


def test_a_gain_for_hybrid_sharding_is_called_possible_and_not_documented() -> None:
    (finding,) = found(pools(), strategy="fsdp-hybrid")
    assert "possible, not documented" in finding.reason


def test_every_strategy_of_the_trainer_has_a_share() -> None:
    known = ("ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3")
    assert all(traffic_share(strategy) for strategy in known)
    assert traffic_share("") is None


def test_the_trainers_bucket_is_what_google_recommends() -> None:
    assert EngineConfig().bucket_bytes == BUCKET_CAP_MB * 2**20


@pytest.mark.parametrize(
    ("given", "rule", "told"),
    [
        (pools(2, reducers=7), "reducers-bring-nothing", "at 2 nodes"),
        (pools(3, reducers=10), "reducers-few-nodes", "at most 1.33x"),
        (pools(4, machine="n1-standard-4"), "reducers-bring-nothing", "n1-standard-4 has none"),
        (pools(4, machine="a3-megagpu-8g", reducers=225), "reducers-undocumented", "whose GPUDirect"),
        (pools(4, machine="a3-highgpu-1g", reducers=4), "reducers-undocumented", "not for a3-highgpu-1g."),
    ],
)
def test_where_reducers_are_not_worth_having_a_warning_says_why(
    given: list[WorkerPoolSpec], rule: str, told: str
) -> None:
    (finding,) = found(given)
    assert (finding.severity, finding.rule) == ("warning", rule)
    assert told in finding.reason


def test_flex_start_is_refused_with_reducers() -> None:
    assert rules(pools(), scheduling_strategy="FLEX_START") == [
        ("error", "reducers-flex-start", "scheduling.strategy")
    ]
    assert rules(pools(), scheduling_strategy="SPOT") == []


def test_reducers_stand_at_index_2_and_nowhere_else() -> None:
    primary, workers, reducers = pools()
    assert rules([primary, reducers]) == [("error", "reducers-place", "worker_pool_specs[1]")]
    assert rules([primary, workers, WorkerPoolSpec(), reducers]) == [
        ("error", "reducers-place", "worker_pool_specs[3]")
    ]
    few = replace(reducers, replica_count=1)
    assert rules([primary, workers, workers, few], strategy="") == [
        ("error", "reducers-place", "worker_pool_specs[3]")
    ]
    assert rules([primary, WorkerPoolSpec(), reducers]) == [
        ("error", "reducers-nodes", "worker_pool_specs[1]")
    ]


def test_what_the_pool_may_not_have_is_an_error_each() -> None:
    primary, workers, _ = pools()
    wrong = WorkerPoolSpec(
        machine_spec=MachineSpec(
            machine_type="n1-standard-16", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1
        ),
        replica_count=13,
        container_spec=ContainerSpec(
            image_uri=IMAGES[0].replace(":latest", ":1"), command=("serve",), args=("--port=1",)
        ),
    )
    pool = "worker_pool_specs[2]"
    assert rules([primary, workers, wrong], strategy="") == [
        ("error", "reducers-accelerator", f"{pool}.machine_spec"),
        ("error", "reducers-program", f"{pool}.container_spec.command"),
        ("error", "reducers-program", f"{pool}.container_spec.args"),
        ("error", "reducers-image", f"{pool}.container_spec.image_uri"),
    ]


@pytest.mark.parametrize(
    ("image", "severities"),
    [
        ("gcr.io/mine/reductionserver:1", ["warning"]),
        ("reduction_server", ["warning"]),
        ("gcr.io/shop/video-reduction-server:3", []),
        ("gcr.io/mine/vertex-ai-restricted/training/reductionserver2", []),
    ],
)
def test_what_is_only_named_like_the_reducer_is_a_warning_at_most(image: str, severities: list[str]) -> None:
    primary, workers, _ = pools()
    other = WorkerPoolSpec(
        machine_spec=V100,
        replica_count=1,
        container_spec=ContainerSpec(image_uri=image, command=("serve",)),
    )
    assert [each.severity for each in found([primary, workers, other], strategy="")] == severities
    assert found([other, workers], strategy="") == []


def test_an_image_of_another_multi_region_is_a_warning() -> None:
    (finding,) = found(pools(), location="europe-west4")
    assert (finding.severity, finding.rule) == ("warning", "reducers-image-region")
    assert IMAGES[1] in finding.fix
    assert found(pools(), location="") == []


def test_parameter_servers_of_other_programs_are_left_alone() -> None:
    primary, workers, _ = pools()
    servers = WorkerPoolSpec(
        machine_spec=MachineSpec(machine_type="n1-standard-4"), replica_count=2, container_spec=PROGRAM
    )
    assert found([primary, workers, servers], strategy="") == []
    assert rules([primary, workers, servers])[-1][1] == "reducers-image"


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [WorkerPoolSpec()] * 4,
        [WorkerPoolSpec(), WorkerPoolSpec(), WorkerPoolSpec(replica_count=-3)],
        [*pools()[:2], WorkerPoolSpec(container_spec=ContainerSpec(image_uri=IMAGES[0]))],
        [*pools()[:2], WorkerPoolSpec(python_package_spec=PythonPackageSpec(), replica_count=2)],
        [WorkerPoolSpec(machine_spec=MachineSpec(machine_type="?"), replica_count=5), *pools()[1:]],
    ],
)
def test_advice_on_broken_pools_raises_nothing(broken: list[WorkerPoolSpec]) -> None:
    for strategy in ("", "ddp", "zero2"):
        found(broken, strategy=strategy, location="?")


def test_a_reducer_whose_egress_is_not_known_is_refused_when_written_and_warned_of_when_read() -> None:
    with pytest.raises(MachineError, match="n1-highcpu-16 or n2-highcpu-16"):
        pools(machine_type="e2-standard-4")
    primary, workers, reducers = pools()
    small = WorkerPoolSpec(
        machine_spec=MachineSpec(machine_type="e2-standard-4"),
        replica_count=13,
        container_spec=reducers.container_spec,
    )
    assert rules([primary, workers, small]) == [
        ("warning", "reducers-machine", "worker_pool_specs[2].machine_spec.machine_type")
    ]


def test_the_image_comes_from_the_nearest_of_three_multi_regions() -> None:
    assert [image_uri(region) for region in ("us-west1", "europe-west4", "australia-southeast1")] == list(
        IMAGES
    )
    with pytest.raises(JobSpecError, match="none of the regions"):
        image_uri("mars-north1")


def test_gains_follow_the_formulas() -> None:
    assert communication_gain(1.0, 1.75) == 1.75
    assert communication_gain(0.0, 1.75) == 1.0
    # performance model: C = A at n = 8 gives 1.27x, A = 2C gives 1.40x
    assert step_gain(compute_seconds=1, exposed_seconds=1, gain=1.75) == pytest.approx(1.27, abs=0.005)
    assert step_gain(compute_seconds=1, exposed_seconds=2, gain=1.75) == pytest.approx(1.40, abs=0.005)
    # prices are made up: 13 reducers at a fiftieth of a node's price cost 6.5 % of 4 nodes
    assert break_even_step_gain(
        num_nodes=4, num_reducers=13, node_price=50, reducer_price=1
    ) == pytest.approx(1.065)
    with pytest.raises(ValueError, match="node_price 0"):
        break_even_step_gain(num_nodes=4, num_reducers=13, node_price=0, reducer_price=1)
