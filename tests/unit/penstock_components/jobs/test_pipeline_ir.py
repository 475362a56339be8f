"""Training jobs in pipelines that anybody compiled: found by GCPC's launchers, judged by their constants."""

from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform import hyperparameter_tuning as hpt
from google_cloud_pipeline_components.v1 import custom_job, hyperparameter_tuning_job
from kfp import compiler, dsl

from penstock_components.jobs.check import check_text
from penstock_components.jobs.findings import Finding

POOL = {
    "machine_spec": {"machine_type": "n1-standard-8"},
    "replica_count": 1,
    "container_spec": {"image_uri": "europe-docker.pkg.dev/p/r/i:1", "args": ["--a=b"]},
}


def findings(pipeline: Any, directory: Path) -> list[Finding]:
    path = directory / "p.yaml"
    compiler.Compiler().compile(dsl.pipeline(name="p")(pipeline), str(path))
    report = check_text(path.read_text())
    assert report.kind == "pipeline"
    return list(report.findings)


def told(found: list[Finding]) -> list[tuple[str, str]]:
    return [(each.path.partition("].")[2], each.rule) for each in found]


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
        custom_job.CustomTrainingJobOp(display_name="x", worker_pool_specs=make().output).set_caching_options(
            False
        )

    assert told(findings(made, tmp_path)) == [("worker_pool_specs", "made-at-run-time")]


@pytest.mark.parametrize("parallel", [2, 20])
def test_a_tuning_job_is_judged_with_its_study(tmp_path: Path, parallel: int) -> None:
    def tuned() -> None:
        hyperparameter_tuning_job.HyperparameterTuningJobRunOp(
            display_name="x",
            base_output_directory="gs://b/x",
            worker_pool_specs=[{**POOL, "machine_spec": {"machine_type": "n1-standard-9"}}],
            study_spec_metrics=hyperparameter_tuning_job.serialize_metrics({"loss": "minimize"}),
            study_spec_parameters=hyperparameter_tuning_job.serialize_parameters(
                {"lr": hpt.DoubleParameterSpec(min=1e-4, max=1e-2, scale="log")}
            ),
            max_trial_count=10,
            parallel_trial_count=parallel,
        ).set_caching_options(False)

    expected = [("worker_pool_specs[0].machine_spec.machine_type", "machine-type")]
    expected += [("parallel_trial_count", "trial-count")] if parallel > 10 else []
    assert sorted(told(findings(tuned, tmp_path))) == sorted(expected)
