"""Jobs made of typed resources: pools in their roles, defaults for NCCL, and what GCPC cannot carry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from google.cloud.aiplatform_v1 import types
from kfp.dsl.pipeline_channel import create_pipeline_channel

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.gcpc import to_gcpc
from penstock_components.jobs.messages import ContainerSpec, CustomJob, EnvVar, PscInterfaceConfig
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.resources import Resources, VpcPeering
from penstock_components.jobs.roles import Evaluators, ParameterServers
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.topology import nodes
from penstock_components.jobs.wire import from_api, to_api

IMAGE = "europe-docker.pkg.dev/p/r/trainer:1"
PROGRAM = ContainerSpec(image_uri=IMAGE, args=("--a=b",), env=(EnvVar(name="A", value="1"),))
CPU = nodes("n1-highcpu-16", 1).machine


def job(strategy_of_trainer: str = "ddp", **resources: Any) -> CustomJob:
    given = {"machine": "a2-highgpu-8g", "num_nodes": 4} | resources
    return Resources(**given).custom_job(
        PROGRAM,
        display_name="train",
        base_output_directory="gs://b/run",
        context=Context(location="europe-west4", strategy=strategy_of_trainer),
    )


def counts(made: CustomJob) -> list[int]:
    assert made.job_spec is not None
    return [pool.replica_count for pool in made.job_spec.worker_pool_specs]


def test_a_job_has_one_primary_and_the_other_nodes_in_pool_1() -> None:
    assert counts(job()) == [1, 3]
    assert counts(job(num_nodes=1)) == [1]


def test_reducers_stand_at_index_2_behind_primary_and_workers() -> None:
    made = job(reduction_server=ReductionServer(replica_count=13))
    assert counts(made) == [1, 3, 13]
    assert made.job_spec is not None
    reducers = made.job_spec.worker_pool_specs[2].container_spec
    assert reducers is not None
    assert reducers.image_uri.startswith("europe-docker.pkg.dev/vertex-ai-restricted/")


def test_parameter_servers_and_evaluators_keep_their_places() -> None:
    servers = ParameterServers(machine=CPU, replica_count=2, container=PROGRAM)
    evaluators = Evaluators(machine=CPU, container=PROGRAM)
    parts = {
        "machine": CPU,
        "num_nodes": 1,
        "restart_job_on_worker_restart": False,
        "strategy_of_trainer": "",
    }
    assert counts(job(**parts, evaluators=evaluators)) == [1, 0, 0, 1]
    assert counts(job(**(parts | {"num_nodes": 3}), parameter_servers=servers, evaluators=evaluators)) == [
        1,
        2,
        2,
        1,
    ]
    with pytest.raises(JobSpecError, match="both are pool 2"):
        job(parameter_servers=servers, reduction_server=ReductionServer(replica_count=13))


def test_nccl_jobs_restart_whole_and_take_ordinary_machines_by_default() -> None:
    told = to_gcpc(job())
    assert told["restart_job_on_worker_restart"] is True
    assert (told["strategy"], told["timeout"]) == ("STANDARD", "604800s")


def test_the_same_job_goes_to_the_api_and_through_gcpc() -> None:
    made = job(
        network=VpcPeering(network="projects/1/global/networks/n", reserved_ip_ranges=("r",)),
        kms_key_name="projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k",
        labels={"team": "a"},
        strategy="FLEX_START",
        timeout=timedelta(hours=1),
        max_wait=timedelta(0),
    )
    proto = types.CustomJob(to_api(made))
    assert proto.job_spec.worker_pool_specs[1].machine_spec.accelerator_count == 8
    assert from_api(CustomJob, to_api(made, "camel")) == made
    told = to_gcpc(made)
    assert (
        types.CustomJobSpec(worker_pool_specs=told.pop("worker_pool_specs")).worker_pool_specs
        == proto.job_spec.worker_pool_specs
    )
    assert told == {
        "display_name": "train",
        "labels": {"team": "a"},
        "encryption_spec_key_name": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k",
        "network": "projects/1/global/networks/n",
        "reserved_ip_ranges": ["r"],
        "base_output_directory": "gs://b/run",
        "strategy": "FLEX_START",
        "timeout": "3600s",
        "max_wait_duration": "0s",
        "restart_job_on_worker_restart": True,
    }


def test_a_psc_interface_goes_through_gcpc_in_snake_case() -> None:
    attachment = "projects/p/regions/europe-west4/networkAttachments/a"
    told = to_gcpc(job(network=PscInterfaceConfig(network_attachment=attachment)))
    assert told["psc_interface_config"] == {"network_attachment": attachment}


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"disable_retries": True, "machine": CPU}, "job_spec.scheduling.disable_retries"),
        ({"experiment": "projects/p/locations/l/metadataStores/default/contexts/e"}, "job_spec.experiment"),
        ({"enable_dashboard_access": True}, "job_spec.enable_dashboard_access"),
    ],
)
def test_what_gcpc_cannot_carry_is_refused_by_name(resources: dict[str, Any], field: str) -> None:
    with pytest.raises(JobSpecError) as refused:
        to_gcpc(job(**resources))
    assert [finding.path for finding in refused.value.findings] == [field]


def test_empty_pools_do_not_go_through_gcpc() -> None:
    evaluators = Evaluators(machine=CPU, container=PROGRAM)
    with pytest.raises(JobSpecError, match="pools behind it move up"):
        to_gcpc(job(machine=CPU, num_nodes=1, evaluators=evaluators))


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"num_nodes": 1, "reduction_server": ReductionServer(replica_count=1)}, "at least 2 nodes"),
        (
            {"reduction_server": ReductionServer(replica_count=13), "strategy": "FLEX_START"},
            "same machine in all pools",
        ),
        ({"timeout": timedelta(days=8)}, "7 days"),
        ({"restart_job_on_worker_restart": False}, "restart"),
        ({"max_wait": timedelta(hours=1)}, "FLEX_START"),
    ],
)
def test_what_vertex_would_refuse_or_hang_on_is_refused_here(resources: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        job(**resources)


def test_all_faults_of_a_job_come_at_once() -> None:
    with pytest.raises(JobSpecError) as refused:
        job(timeout=timedelta(days=8), labels={"Team": "a"}, network=VpcPeering(network="default"))
    assert [finding.path for finding in refused.value.findings] == [
        "labels['Team']",
        "job_spec.scheduling.timeout",
        "job_spec.network",
    ]


def test_what_a_pipeline_parameter_would_decide_is_refused_with_the_reason() -> None:
    count = create_pipeline_channel(name="count", channel_type="NUMBER_INTEGER")
    machine = create_pipeline_channel(name="machine", channel_type="STRING")
    for given in (
        {"num_nodes": count},
        {"machine": machine},
        {"machine": f"{machine}"},
        {"strategy": machine},
    ):
        with pytest.raises(JobSpecError, match="known only when the pipeline runs"):
            Resources(**({"machine": "a2-highgpu-8g"} | given))


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"num_nodes": 2.0}, "num_nodes"),
        ({"num_nodes": "2"}, "num_nodes"),
        ({"num_nodes": True}, "num_nodes"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"network": "projects/1/global/networks/n"}, "network"),
        ({"network": VpcPeering(network="n", reserved_ip_ranges="abc")}, "network.reserved_ip_ranges"),
        ({"timeout": 3600}, "timeout"),
        ({"labels": {"a": 1}}, "labels['a']"),
        ({"disk": {"boot_disk_size_gb": 100}}, "disk"),
        ({"strategy": "PREEMPTIBLE"}, "strategy"),
    ],
)
def test_a_value_of_another_type_is_told_by_its_field(given: dict[str, Any], path: str) -> None:
    with pytest.raises(JobSpecError) as refused:
        Resources(**({"machine": "a2-highgpu-8g"} | given))
    assert [finding.path for finding in refused.value.findings] == [path]


def test_a_program_whose_words_are_one_text_is_refused() -> None:
    program: Any = ContainerSpec(image_uri=IMAGE, args="--a=b", env=(EnvVar(name="A", value=1),))  # type: ignore[arg-type]
    with pytest.raises(JobSpecError) as refused:
        Resources(machine=CPU).custom_job(program, display_name="x", context=Context(location="us-central1"))
    assert [finding.path for finding in refused.value.findings] == ["program.args", "program.env[0].value"]


def test_a_machine_that_does_not_exist_is_told_beside_all_other_faults() -> None:
    with pytest.raises(JobSpecError) as refused:
        job(machine="a2-highgpu-8gb", timeout=timedelta(days=8))
    told = {finding.path: finding.reason for finding in refused.value.findings}
    assert "job_spec.scheduling.timeout" in told
    assert "a2-highgpu-8g" in told["job_spec.worker_pool_specs[0].machine_spec.machine_type"]


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    job(reduction_server=ReductionServer(replica_count=2))
    assert "bottleneck" in caplog.text
