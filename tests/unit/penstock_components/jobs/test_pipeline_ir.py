"""Training jobs in pipelines that anybody compiled: found by GCPC's launchers, judged by their constants."""

import copy
import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform import hyperparameter_tuning as hpt
from google_cloud_pipeline_components.v1 import custom_job, hyperparameter_tuning_job
from kfp import compiler, dsl

from penstock_components.jobs.check import Report, check_document
from penstock_components.jobs.findings import Finding
from penstock_components.jobs.pipeline_ir import training_jobs
from penstock_components.jobs.rules.context import Context

GOLDEN = Path(__file__).parents[3] / "golden"
IMAGE = {"image_uri": "europe-docker.pkg.dev/p/r/i:1", "args": ["--a=b"]}
POOL = {"machine_spec": {"machine_type": "n1-standard-8"}, "replica_count": 1, "container_spec": IMAGE}
L4 = {"machine_type": "g2-standard-12", "accelerator_type": "NVIDIA_L4", "accelerator_count": 1}
NODE = {**POOL, "machine_spec": L4}
PSC = {"network_attachment": "projects/p/regions/us-central1/networkAttachments/a"}
OP = "root.dag.tasks[custom-training-job]"


@functools.cache
def golden(name: str) -> Any:
    return yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())


def compiled(pipeline: Any, directory: Path) -> Any:
    path = directory / "p.yaml"
    compiler.Compiler().compile(dsl.pipeline(name="p")(pipeline), str(path))
    return yaml.safe_load(path.read_text())


def checked(pipeline: Any, directory: Path, context: Context | None = None) -> Report:
    report = check_document(compiled(pipeline, directory), context=context)
    assert report.kind == "pipeline"
    return report


def findings(pipeline: Any, directory: Path) -> list[Finding]:
    return list(checked(pipeline, directory).findings)


def told(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.path.partition("].")[2], each.rule) for each in found]


def trained(**arguments: Any) -> Any:
    """A task that is not cached, whose job has an output directory."""
    given = {"display_name": "x", "worker_pool_specs": [POOL], "base_output_directory": "gs://b/x"}
    return custom_job.CustomTrainingJobOp(**(given | arguments)).set_caching_options(False)


def tuned(pools: list[Any], **arguments: Any) -> None:
    given: dict[str, Any] = {
        "display_name": "x",
        "base_output_directory": "gs://b/x",
        "worker_pool_specs": pools,
        "study_spec_metrics": hyperparameter_tuning_job.serialize_metrics({"loss": "minimize"}),
        "study_spec_parameters": hyperparameter_tuning_job.serialize_parameters(
            {"lr": hpt.DoubleParameterSpec(min=1e-4, max=1e-2, scale="log")}
        ),
        "max_trial_count": 10,
        "parallel_trial_count": 2,
    }
    hyperparameter_tuning_job.HyperparameterTuningJobRunOp(**(given | arguments)).set_caching_options(False)


def test_a_job_in_a_nested_pipeline_is_judged_at_its_task(tmp_path: Path) -> None:
    def nested(account: str = "") -> None:
        with dsl.If(account == ""):
            custom_job.CustomTrainingJobOp(
                display_name="x", worker_pool_specs=[{**POOL, "replica_count": 3}], service_account=account
            ).set_caching_options(False)

    [finding] = [each for each in findings(nested, tmp_path) if each.severity == "error"]
    assert finding.path.startswith(
        "components[comp-condition-1].dag.tasks[custom-training-job].worker_pool_specs[0]"
    )
    assert finding.rule == "primary-replicas"


def test_a_cached_training_task_is_warned_of(tmp_path: Path) -> None:
    def cached() -> None:
        custom_job.CustomTrainingJobOp(display_name="x", worker_pool_specs=[POOL])

    assert told(findings(cached, tmp_path)) == [("cachingOptions", "training-is-cached")]


def test_pools_that_a_task_makes_are_said_to_be_out_of_sight(tmp_path: Path) -> None:
    @dsl.component(base_image="python:3.11")
    def make() -> list:
        return []

    def made() -> None:
        trained(worker_pool_specs=make().output)

    report = checked(made, tmp_path)
    assert told(list(report.findings)) == [("worker_pool_specs", "made-at-run-time")]
    assert report.num_jobs == 1


@pytest.mark.parametrize("parallel", [2, 20])
def test_a_tuning_job_is_judged_with_its_study(tmp_path: Path, parallel: int) -> None:
    def tuning() -> None:
        pool = {**POOL, "machine_spec": {"machine_type": "n1-standard-9"}}
        tuned([pool], parallel_trial_count=parallel)

    expected = [("worker_pool_specs[0].machine_spec.machine_type", "machine-type")]
    expected += [("parallel_trial_count", "trial-count")] if parallel > 10 else []
    assert sorted(told(findings(tuning, tmp_path))) == sorted(expected)


def test_nothing_is_said_of_inputs_that_are_decided_when_the_pipeline_runs(tmp_path: Path) -> None:
    def decided_later(
        strategy: str = "FLEX_START",
        wait: str = "3600s",
        seconds: int = 60,
        restart: bool = True,
        board: str = "",
        network: str = "",
        ranges: list = [],  # noqa: B006  # kfp reads the default
    ) -> None:
        trained(worker_pool_specs=[NODE, NODE], restart_job_on_worker_restart=restart)
        trained(strategy=strategy, max_wait_duration="3600s", timeout=f"{seconds}s")
        trained(strategy=f"{strategy}", max_wait_duration=wait)
        trained(tensorboard=board)
        trained(network=network, psc_interface_config=PSC)
        trained(reserved_ip_ranges=ranges)
        trained(network=network, reserved_ip_ranges=["r"])

    report = checked(decided_later, tmp_path)
    assert (report.findings, report.num_jobs) == ((), 7)


def test_what_is_unknown_is_named_by_field_and_by_message_when_nothing_of_it_is_known(tmp_path: Path) -> None:
    def decided_later(strategy: str, out: str) -> None:
        trained(strategy=strategy, base_output_directory=out, display_name=f"{strategy}-x")

    [job] = training_jobs(compiled(decided_later, tmp_path))
    assert job.unknown == {
        "job_spec.scheduling.strategy",
        "job_spec.base_output_directory",
        "job_spec.base_output_directory.output_uri_prefix",
    }


def test_a_study_that_is_made_while_the_pipeline_runs_leaves_its_trials_to_be_judged(tmp_path: Path) -> None:
    def tuning(parameters: list, trials: int) -> None:
        pool = {**POOL, "replica_count": 2}
        tuned([pool], study_spec_parameters=parameters, max_trial_count=trials)

    assert sorted(told(findings(tuning, tmp_path))) == [
        ("study_spec_parameters", "made-at-run-time"),
        ("worker_pool_specs[0].replica_count", "primary-replicas"),
    ]


def test_constants_are_followed_through_sub_pipelines_to_where_they_stand(tmp_path: Path) -> None:
    @dsl.pipeline(name="inner")
    def inner(pools: list, strategy: str = "STANDARD") -> None:
        trained(worker_pool_specs=pools, strategy=strategy)

    @dsl.pipeline(name="outer")
    def outer(nodes: list, strategy: str = "SPOTTY") -> None:
        inner(pools=nodes, strategy=strategy)

    def root(strategy: str = "nonsense") -> None:
        outer(nodes=[{**POOL, "replica_count": 3}])
        outer(nodes=[POOL], strategy="SPOTT")
        inner(pools=[POOL, {**POOL, "replica_count": 0.5}], strategy=strategy)

    report = checked(root, tmp_path)
    assert {(each.path, each.rule) for each in report.findings} == {
        ("root.dag.tasks[outer].nodes[0].replica_count", "primary-replicas"),
        ("root.dag.tasks[outer].strategy", "enum"),
        ("root.dag.tasks[outer-2].strategy", "enum"),
        ("root.dag.tasks[inner].pools[1].replica_count", "number-expected"),
    }
    assert report.num_jobs == 3


def test_the_items_of_a_loop_are_not_taken_for_constants(tmp_path: Path) -> None:
    def looped() -> None:
        with dsl.ParallelFor(items=[{"strategy": "SPOT"}, {"strategy": "STANDARD"}]) as item:
            trained(strategy=item.strategy, display_name=item.strategy)

    assert findings(looped, tmp_path) == []


def test_a_pipeline_job_decides_its_parameters(tmp_path: Path) -> None:
    def asked(strategy: str, account: str) -> None:
        trained(strategy=strategy, service_account=account)

    job = {
        "pipelineSpec": compiled(asked, tmp_path),
        "runtimeConfig": {"parameterValues": {"strategy": "SPOTT"}},
    }
    assert [(each.path, each.rule) for each in check_document(job).findings] == [
        ("runtimeConfig.parameterValues.strategy", "enum")
    ]


def test_the_location_of_a_task_is_that_of_its_job(tmp_path: Path) -> None:
    mega = {
        "machine_type": "a3-megagpu-8g",
        "accelerator_type": "NVIDIA_H100_MEGA_80GB",
        "accelerator_count": 8,
    }
    pools = [{**POOL, "machine_spec": mega}]

    def placed(location: str = "africa-south1") -> None:
        trained(worker_pool_specs=pools, location="africa-south1")
        trained(worker_pool_specs=pools)
        trained(worker_pool_specs=pools, location=location)

    def regions(location: str) -> list[str]:
        report = checked(placed, tmp_path, Context(location=location))
        return [each.path.partition("].")[0] for each in report.findings if each.rule == "region"]

    assert regions("us-central1") == [OP[:-1]]
    assert regions("africa-south1") == [OP[:-1], f"{OP[:-1]}-2"]


def test_what_the_tuning_op_cannot_carry_is_a_warning_that_says_so(tmp_path: Path) -> None:
    run = {**IMAGE, "command": ["torchrun", "--nnodes=2", "train.py"]}

    def tuning() -> None:
        tuned([{**NODE, "container_spec": run}] * 2)

    [finding] = findings(tuning, tmp_path)
    assert finding.rule == "restart-job"
    assert finding.severity == "warning"
    assert (
        finding.fix
        == "HyperparameterTuningJobRunOp has no input for it: to set it, send the study with the SDK or REST."
    )


def test_a_missing_output_directory_is_told_at_the_input_for_it(tmp_path: Path) -> None:
    def spot() -> None:
        trained(strategy="SPOT", base_output_directory="")

    assert told(findings(spot, tmp_path)) == [("base_output_directory", "output-directory-missing")]


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("job_spec.worker_pool_specs[0].replica_count", f"{OP}.worker_pool_specs[0].replica_count"),
        ("job_spec.base_output_directory.output_uri_prefix", f"{OP}.base_output_directory"),
        ("job_spec.base_output_directory", f"{OP}.base_output_directory"),
        ("encryption_spec", f"{OP}.encryption_spec_key_name"),
        ("job_spec.network", f"{OP}.network"),
        ("job_spec.scheduling", OP),
        ("job_spec.networking", f"{OP}.job_spec.networking"),
    ],
)
def test_a_field_is_told_at_the_input_that_carries_it(tmp_path: Path, field: str, place: str) -> None:
    def one() -> None:
        trained()

    [job] = training_jobs(compiled(one, tmp_path))
    assert job.path_of(field) == place
    assert job.carries(field) == (field != "job_spec.networking")


def test_the_preview_op_is_a_training_job_too(tmp_path: Path) -> None:
    def older() -> None:
        trained(worker_pool_specs=[{**POOL, "replica_count": 7}])

    document = compiled(older, tmp_path)
    command = document["deploymentSpec"]["executors"]["exec-custom-training-job"]["container"]["command"]
    command[-1] = "google_cloud_pipeline_components.container.preview.custom_job.launcher"
    report = check_document(document)
    assert report.num_jobs == 1
    assert told(list(report.findings)) == [("worker_pool_specs[0].replica_count", "primary-replicas")]


def with_payload(payload: str, directory: Path) -> list[Finding]:
    """Of a component that holds its job in its own text, as AutoML's do."""

    @dsl.container_component
    def automl(root: str, gcp_resources: dsl.OutputPath(str)):  # type: ignore[valid-type,no-untyped-def]  # as kfp has it
        launcher = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
        arguments = ["--type", "CustomJob", "--payload", payload, "--location", "us-central1"]
        return dsl.ContainerSpec(
            image="gcr.io/ml-pipeline/google-cloud-pipeline-components:2.22.0",
            command=["python3", "-u", "-m", launcher],
            args=[*arguments, "--gcp_resources", gcp_resources, root],
        )

    def pipeline() -> None:
        automl(root="gs://b").set_caching_options(False)

    report = checked(pipeline, directory)
    assert report.num_jobs == 1
    return list(report.findings)


def test_a_job_in_the_text_of_a_component_is_judged_where_it_is_constant(tmp_path: Path) -> None:
    placeholder = "{{$.inputs.parameters['root']}}"
    job = {"display_name": "x", "job_spec": {"worker_pool_specs": [POOL], "service_account": placeholder}}
    assert with_payload(json.dumps(job), tmp_path) == []
    later: dict[str, Any] = {**POOL, "replica_count": placeholder, "machine_spec": {"Concat": ["n1", "-x"]}}
    assert with_payload(json.dumps({**job, "job_spec": {"worker_pool_specs": [later]}}), tmp_path) == []
    assert with_payload('{"display_name": ' + placeholder + "}", tmp_path) == []
    assert with_payload('{"Concat": ["{", "}"]}', tmp_path) == []

    wrong = {**job, "job_spec": {"worker_pool_specs": [{**POOL, "replica_count": 2}]}}
    [finding] = with_payload(json.dumps(wrong), tmp_path)
    assert finding.path == "root.dag.tasks[automl].payload.job_spec.worker_pool_specs[0].replica_count"


def test_a_pipeline_that_calls_itself_is_looked_into_once() -> None:
    document = copy.deepcopy(golden("tiny-fsdp"))
    dag = document["components"]["comp-exit-handler-1"]["dag"]
    dag["tasks"]["again"] = {"componentRef": {"name": "comp-exit-handler-1"}}
    assert check_document(document).num_jobs == 1


def test_calls_that_double_at_every_level_end() -> None:
    def level(number: int) -> dict[str, Any]:
        call = {"componentRef": {"name": f"c{number + 1}"}}
        return {"dag": {"tasks": {"a": call, "b": call}}}

    components = {f"c{number}": level(number) for number in range(40)}
    document = {"pipelineInfo": {}, "components": components, "root": level(-1)}
    assert list(training_jobs(document)) == []


@pytest.mark.parametrize("spec", ["gs://bucket/p.yaml", [1], None, 5, {}])
def test_a_pipeline_job_without_its_pipeline_is_one_finding(spec: Any) -> None:
    [finding] = check_document({"pipelineSpec": spec, "runtimeConfig": {}}).findings
    assert (finding.path, finding.rule) == ("pipelineSpec", "pipeline-spec")


ODD_VALUES: list[Any] = [
    *(None, True, 5, -1, 2.5, float("nan"), "", "text", "{{$.inputs.parameters['x']}}", "{bad", "[1]"),
    *([], {}, [1, {"a": "b"}], {"a": [1]}, [None], {"constant": 5}, {"1": {"2": "3"}}),
    *({1: {2: 3}}, {16**9999: {}}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key in a document."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@pytest.mark.parametrize("seed", range(8))
def test_no_value_anywhere_in_a_pipeline_makes_the_check_fail(seed: int) -> None:
    chance = random.Random(seed)
    document = copy.deepcopy(golden(chance.choice(["tiny-fsdp", "tiny-zero2"])))
    for _ in range(60):
        holder, key = chance.choice(list(places(document)))
        kept, holder[key] = holder[key], copy.deepcopy(chance.choice(ODD_VALUES))
        assert check_document(document).kind in ("pipeline", "")
        if chance.random() < 0.8:
            holder[key] = kept


@pytest.mark.parametrize("odd", ODD_VALUES, ids=range(len(ODD_VALUES)))
@pytest.mark.parametrize(
    "place",
    [
        *("deploymentSpec", "components", "root", "deploymentSpec.executors"),
        *(f"deploymentSpec.executors.exec-custom-training-job{rest}" for rest in ("", ".container")),
        *(f"deploymentSpec.executors.exec-custom-training-job.container.{rest}" for rest in ("args", "command")),
        *(f"components.comp-custom-training-job{rest}" for rest in ("", ".executorLabel", ".inputDefinitions")),
        "components.comp-exit-handler-1.dag.tasks.custom-training-job.componentRef.name",
        "components.comp-exit-handler-1.dag.tasks.custom-training-job.inputs.parameters",
        "components.comp-exit-handler-1.dag.tasks.custom-training-job.inputs.parameters.worker_pool_specs.runtimeValue.constant",
    ],
)  # fmt: skip
def test_odd_values_where_training_jobs_are_looked_for_are_no_tracebacks(place: str, odd: Any) -> None:
    document = copy.deepcopy(golden("tiny-fsdp"))
    *holders, last = place.split(".")
    holder = document
    for name in holders:
        holder = holder[name]
    holder[last] = odd
    assert check_document(document).kind == "pipeline"
