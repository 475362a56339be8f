"""Parameter servers and evaluators as pools of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kfp.dsl.pipeline_channel import create_pipeline_channel

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import ContainerSpec, MachineSpec, PythonPackageSpec, WorkerPoolSpec
from penstock_components.jobs.roles import Evaluators, ParameterServers, later_pools
from penstock_components.machines.catalogue import MachineError

MACHINE = MachineSpec(machine_type="n1-highmem-8")
CONTAINER = ContainerSpec(image_uri="europe-docker.pkg.dev/acme/train/tf:1")
SERVERS = ParameterServers(machine=MACHINE, replica_count=3, container=CONTAINER)
EVALUATORS = Evaluators(machine=MACHINE, container=CONTAINER)
REDUCERS = WorkerPoolSpec(replica_count=2, container_spec=ContainerSpec(image_uri="reductionserver"))


def test_a_role_is_a_pool_of_its_machine_and_program() -> None:
    assert SERVERS.pool() == WorkerPoolSpec(machine_spec=MACHINE, replica_count=3, container_spec=CONTAINER)
    assert EVALUATORS.pool().replica_count == 1
    package = PythonPackageSpec(executor_image_uri="image", python_module="task")
    pool = ParameterServers(machine=MACHINE, replica_count=1, container=package).pool()
    assert (pool.container_spec, pool.python_package_spec) == (None, package)


def test_a_machine_type_alone_is_a_machine_with_its_accelerators() -> None:
    l4 = MachineSpec(machine_type="g2-standard-12", accelerator_type="NVIDIA_L4", accelerator_count=1)
    servers = ParameterServers(machine="n1-highmem-8", replica_count=3, container=CONTAINER)
    assert servers.pool() == SERVERS.pool()
    assert Evaluators(machine="g2-standard-12", container=CONTAINER).pool().machine_spec == l4
    with pytest.raises(MachineError, match="Did you mean n1-highmem-"):
        Evaluators(machine="n1-highmem-9", container=CONTAINER).pool()


@pytest.mark.parametrize(
    ("count", "told", "rule"),
    [
        (2.0, r"2\.0, of type float", "python-type"),
        ("2", "'2', of type str", "python-type"),
        (True, "True, of type bool", "python-type"),
        (
            create_pipeline_channel(name="replicas", channel_type="NUMBER_INTEGER"),
            "known only when the pipeline runs",
            "placeholder",
        ),
    ],
)
def test_a_number_of_replicas_is_an_int_of_the_compile(count: Any, told: str, rule: str) -> None:
    for make in (ParameterServers, Evaluators):
        with pytest.raises(JobSpecError, match=told) as caught:
            make(machine=MACHINE, replica_count=count, container=CONTAINER)
        assert [each.rule for each in caught.value.findings] == [rule]


def test_pools_stand_at_the_index_of_their_role() -> None:
    assert later_pools() == ()
    assert later_pools(reducers=REDUCERS) == (REDUCERS,)
    assert later_pools(parameter_servers=SERVERS) == (SERVERS.pool(),)
    assert later_pools(parameter_servers=SERVERS, evaluators=EVALUATORS) == (
        SERVERS.pool(),
        EVALUATORS.pool(),
    )
    assert later_pools(reducers=REDUCERS, evaluators=EVALUATORS) == (REDUCERS, EVALUATORS.pool())


def test_an_empty_pool_holds_the_place_of_pool_2_before_evaluators() -> None:
    assert later_pools(evaluators=EVALUATORS) == (WorkerPoolSpec(), EVALUATORS.pool())


def test_parameter_servers_beside_a_reduction_server_are_refused() -> None:
    with pytest.raises(JobSpecError, match="Reduction Server and parameter servers were given") as caught:
        later_pools(reducers=REDUCERS, parameter_servers=SERVERS)
    [finding] = caught.value.findings
    assert finding.path == "worker_pool_specs[2]"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ParameterServers(machine=MACHINE, replica_count=0, container=CONTAINER), "there are 0 parameter servers"),
        (lambda: Evaluators(machine=MACHINE, replica_count=-1, container=CONTAINER), "there are -1 evaluators"),
    ],
)  # fmt: skip
def test_a_role_without_replicas_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(JobSpecError, match=told):
        make()
