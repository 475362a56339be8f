from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from penstock_trainer.cluster import Cluster, ClusterError

PRIMARY = ["cmle-training-workerpool0-ab-0:2222"]
WORKERS = ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"]
REDUCERS = ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"]
EVALUATORS = ["cmle-training-workerpool3-ab-0:2222"]
WITH_TRAINERS = {"workerpool0": PRIMARY, "workerpool1": WORKERS}
OTHER_POOLS: tuple[dict[str, list[str]], ...] = (
    {},
    {"workerpool2": REDUCERS},
    {"workerpool3": EVALUATORS},
    {"workerpool2": REDUCERS, "workerpool3": EVALUATORS},
    {"workerpool2": []},  # dumps of real jobs leave an empty pool out; nothing says that it must be
)
# The documentation describes an object; dumps of real jobs have its JSON text, or nothing.
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"job": {"worker_pool_specs": [{"replica_count": 1}]}},
    {"job": '{"python_module":"","package_uris":[],"job_args":["--cluster={}"]}'},
    {"job": ""},
)
TRIALS: tuple[dict[str, str], ...] = ({}, {"trial": ""})


def spec(pool: str, index: object, *, cluster: object = None, **more: Any) -> dict[str, Any]:
    cluster = {"workerpool0": PRIMARY, "workerpool1": WORKERS} if cluster is None else cluster
    return {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"type": pool, "index": index},
        **more,
    }


def read(told: object, **environ: str) -> Cluster:
    return Cluster.from_environ({"CLUSTER_SPEC": json.dumps(told), **environ})


@pytest.mark.parametrize(("pool", "index", "node_rank"), [("workerpool0", 0, 0), ("workerpool1", 1, 2)])
def test_the_documented_shape_counts_pools_0_and_1(pool: str, index: int, node_rank: int) -> None:
    pools = {
        "workerpool0": PRIMARY,
        "workerpool1": WORKERS,
        "workerpool2": REDUCERS,
        "workerpool3": ["cmle-training-workerpool3-ab-0:2222"],
    }
    told = spec(pool, index, cluster=pools, job={"worker_pool_specs": []})
    told["task"]["trial"] = ""
    assert read(told) == Cluster(
        num_nodes=3,
        node_rank=node_rank,
        primary_host="cmle-training-workerpool0-ab-0",
        primary_port=2222,
        open_ports=(),
        pool=pool,
    )


@pytest.mark.parametrize("others", OTHER_POOLS, ids=lambda pools: "+".join(pools) or "none")
@pytest.mark.parametrize("job", JOBS, ids=["no job", "object", "text", "empty text"])
@pytest.mark.parametrize("trial", TRIALS, ids=["no trial", "empty trial"])
def test_no_variant_of_the_rest_changes_the_ranks_of_pools_0_and_1(
    others: Mapping[str, list[str]], job: Mapping[str, Any], trial: Mapping[str, str]
) -> None:
    nodes = [("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)]
    for order in itertools.permutations({**WITH_TRAINERS, **others}.items()):
        read_by_each = []
        for pool, index in nodes:
            told = spec(pool, index, cluster=dict(order), **job)
            told["task"].update(trial)
            read_by_each.append(read(told))
        assert [(node.node_rank, node.num_nodes) for node in read_by_each] == [(0, 3), (1, 3), (2, 3)]
        assert {(node.primary_host, node.primary_port) for node in read_by_each} == {
            ("cmle-training-workerpool0-ab-0", 2222)
        }


@pytest.mark.parametrize("others", OTHER_POOLS, ids=lambda pools: "+".join(pools) or "none")
def test_a_lone_primary_beside_other_pools_is_a_world_of_one_node(others: Mapping[str, list[str]]) -> None:
    for order in itertools.permutations({"workerpool0": PRIMARY, **others}.items()):
        cluster = read(spec("workerpool0", 0, cluster=dict(order)))
        assert (cluster.num_nodes, cluster.node_rank, cluster.is_primary) == (1, 0, True)


def test_a_real_dump_with_the_job_as_text_and_open_ports() -> None:
    text = (
        '{"cluster":{"workerpool0":["cmle-training-workerpool0-4c1d6d97d0-0:2222"],"workerpool1":'
        '["cmle-training-workerpool1-4c1d6d97d0-0:2222","cmle-training-workerpool1-4c1d6d97d0-1:2222"]},'
        '"environment":"cloud","task":{"type":"workerpool1","index":0},'
        '"job":"{\\"python_module\\":\\"\\",\\"package_uris\\":[],\\"job_args\\":[]}","open_ports":[3333]}'
    )
    cluster = Cluster.from_environ({"CLUSTER_SPEC": text})
    assert (cluster.num_nodes, cluster.node_rank, cluster.open_ports) == (3, 1, (3333,))
    assert not cluster.is_primary


@pytest.mark.parametrize("ports", ["3333", 3333, ["3333"], [True], [0], [65536], None, {"a": 1}])
def test_open_ports_of_another_form_are_passed_over_for_nobody_documents_them(ports: object) -> None:
    assert read(spec("workerpool0", 0, open_ports=ports)).open_ports == ()


def test_a_job_of_one_replica_has_no_pool_1() -> None:
    cluster = read(spec("workerpool0", 0, cluster={"workerpool0": PRIMARY}))
    assert (cluster.num_nodes, cluster.node_rank, cluster.is_primary) == (1, 0, True)


def test_without_a_spec_this_machine_is_alone() -> None:
    cluster = Cluster.from_environ({"RANK": "3", "WORLD_SIZE": "9"})
    assert (cluster.num_nodes, cluster.primary_host, cluster.primary_port) == (1, "127.0.0.1", 0)


def test_node_level_rank_and_world_size_of_vertex_are_not_read() -> None:
    told = spec("workerpool1", 0)
    vertex = {"RANK": "7", "WORLD_SIZE": "5", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "3333"}
    assert read(told, **vertex) == read(told)


def test_a_trial_id_changes_nothing() -> None:
    told = spec("workerpool1", 0)
    told["task"]["trial"] = "12"
    assert read(told) == read(spec("workerpool1", 0))


@pytest.mark.parametrize("pool", ["workerpool2", "workerpool3"])
def test_a_trainer_in_another_pool_is_an_error(pool: str) -> None:
    with pytest.raises(ClusterError, match=f"this replica is in {pool}, where no trainer runs"):
        read(spec(pool, 0))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([], r"CLUSTER_SPEC is \[\]: it must be a JSON object"),
        ({"task": {"type": "workerpool0", "index": 0}}, "CLUSTER_SPEC.cluster is None"),
        ({"cluster": {"workerpool0": PRIMARY}}, "CLUSTER_SPEC.task is None"),
        (spec("workerpool0", 0, cluster={}), r"workerpool0 is \[\]: it must name one replica"),
        (spec("workerpool0", 0, cluster={"workerpool0": PRIMARY * 2}), "must name one replica"),
        (spec("workerpool0", 0, cluster={"workerpool0": "host:1"}), "must be a list"),
        (spec("workerpool0", 0, cluster={"workerpool0": ["host"]}), "'host': it must be \"host:port\""),
        (spec("workerpool0", 0, cluster={"workerpool0": ["host:99999"]}), 'must be "host:port"'),
        (spec("chief", 0), "task.type is 'chief': it must be one of workerpool0 to workerpool3"),
        (spec("workerpool1", 2), r"task.index is 2: workerpool1 has 2 replica\(s\), counted from 0"),
        (spec("workerpool1", "0"), "task.index is '0'"),
        (spec("workerpool0", 1), r"workerpool0 has 1 replica\(s\)"),
    ],
)
def test_a_malformed_spec_is_told_with_what_was_given(told: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read(told)


def test_text_that_is_not_json_is_told() -> None:
    with pytest.raises(ClusterError, match=r"not JSON .*: '\{cluster'"):
        Cluster.from_environ({"CLUSTER_SPEC": "{cluster"})
