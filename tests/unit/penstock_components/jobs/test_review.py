"""Differences read like a change review."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_components.jobs.review import Rate, ReviewError, normalised, review

GOLDEN = Path(__file__).parents[3] / "golden"
DIGEST = "@sha256:" + "a" * 64


def job(**changes: Any) -> dict[str, Any]:
    machine = {"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 8}
    container = {
        "imageUri": f"europe-docker.pkg.dev/p/r/trainer{DIGEST}",
        "command": ["python", "-m", "penstock_trainer"],
        "args": ['--config={"engine":{"strategy":"zero2"},"steps":100}', "--seed=1"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    }
    pools = [
        {"machineSpec": machine, "replicaCount": count, "containerSpec": container}
        for count in (1, changes.pop("workers", 1))
    ]
    spec = {"workerPoolSpecs": pools, "scheduling": {"strategy": "SPOT"}} | changes
    return {"displayName": "train", "jobSpec": copy.deepcopy(spec)}


def test_equal_jobs_have_no_difference_whatever_their_case() -> None:
    snake = {
        "display_name": "train",
        "job_spec": {"scheduling": {"strategy": "SPOT"}, "worker_pool_specs": []},
    }
    assert review(job(), job()) == []
    assert review(snake, {"displayName": "train", "jobSpec": {"scheduling": {"strategy": "SPOT"}}}) == []


def test_machines_scheduling_account_and_hours_are_told_in_words() -> None:
    new = job(workers=3, scheduling={"strategy": "FLEX_START"}, serviceAccount="t@p.iam.gserviceaccount.com")
    rate = Rate(epoch_tokens=16 * 12 * 3600 * 1000.0, tokens_per_second=1000.0)
    assert review(job(), new, rate=rate) == [
        "machines 2 -> 4 x a3-highgpu-8g",
        "Spot -> Flex-start",
        "new service account t@p.iam.gserviceaccount.com",
        "hours per epoch 12 -> 6",
    ]


def test_an_images_digest_the_trainers_fields_and_env_are_told_one_by_one() -> None:
    new = job()
    for pool in new["jobSpec"]["workerPoolSpecs"]:
        container = pool["containerSpec"]
        container["imageUri"] = container["imageUri"].replace("a" * 64, "b" * 64)
        container["args"] = ['--config={"engine":{"strategy":"fsdp-full"},"steps":100}', "--seed=2"]
        container["env"] = []
    assert review(job(), new) == [
        "image digest changed: europe-docker.pkg.dev/p/r/trainer sha256:aaaaaaaaaaaa -> sha256:bbbbbbbbbbbb",
        "engine.strategy zero2 -> fsdp-full",
        "--seed 1 -> 2",
        "env NCCL_DEBUG INFO removed",
    ]


def test_a_new_pool_and_another_machine_are_told() -> None:
    new = job()
    reducers = {
        "machineSpec": {"machineType": "n1-highcpu-16"},
        "replicaCount": 4,
        "containerSpec": {"imageUri": "r"},
    }
    new["jobSpec"]["workerPoolSpecs"].append(reducers)
    for pool in new["jobSpec"]["workerPoolSpecs"][:2]:
        pool["machineSpec"] = {
            "machineType": "g2-standard-12",
            "acceleratorType": "NVIDIA_L4",
            "acceleratorCount": 1,
        }
    assert review(job(), new) == [
        "machines 2 x a3-highgpu-8g with 8 x NVIDIA_H100_80GB -> 2 x g2-standard-12 with 1 x NVIDIA_L4",
        "new parameter servers or Reduction Server: 4 x n1-highcpu-16",
    ]


def test_what_has_no_words_of_its_own_is_told_by_its_path() -> None:
    new = job(network="projects/1/global/networks/n")
    new["labels"] = {"team": "a"}
    assert review(job(), new) == ["new jobSpec.network projects/1/global/networks/n", "new labels.team a"]


def test_two_pipelines_are_compared_by_their_jobs_and_the_rest_by_path() -> None:
    zero2 = yaml.safe_load((GOLDEN / "tiny-zero2.yaml").read_text())
    fsdp = yaml.safe_load((GOLDEN / "tiny-fsdp.yaml").read_text())
    lines = review(zero2, fsdp)
    assert "removed parameter servers or Reduction Server: 1 x n1-highcpu-16" in lines
    assert "engine.strategy zero2 -> fsdp-full" in lines
    assert "pipelineInfo.name pretrain-tiny-zero2 -> pretrain-tiny-fsdp" in lines
    assert review(zero2, zero2) == []


def test_descriptions_and_the_sdks_version_say_nothing_about_a_run() -> None:
    assert normalised({"a": [{"description": "x", "b": 1}], "sdkVersion": "kfp-2.17.0"}) == {"a": [{"b": 1}]}


def test_a_tuning_jobs_trials_and_its_study_are_compared() -> None:
    def tuning(most: int, **spec: Any) -> dict[str, Any]:
        return {"displayName": "t", "trialJobSpec": job(**spec)["jobSpec"], "maxTrialCount": most}

    assert review(tuning(10), tuning(20, workers=3)) == [
        "machines 2 -> 4 x a3-highgpu-8g",
        "maxTrialCount 10 -> 20",
    ]


def test_what_looks_like_a_secret_is_not_shown() -> None:
    def keyed(key: str) -> dict[str, Any]:
        told = job()
        for pool in told["jobSpec"]["workerPoolSpecs"]:
            pool["containerSpec"]["env"] = [{"name": "WANDB_API_KEY", "value": key}]
            pool["containerSpec"]["args"] = [f"--api-key={key}"]
        return told

    lines = review(keyed("0123456789abcdef"), keyed("fedcba9876543210"))
    assert lines == [
        "--api-key changed (looks like a secret: not shown)",
        "env WANDB_API_KEY changed (looks like a secret: not shown)",
    ]
    assert "abcdef" not in "".join(review(job(), keyed("0123456789abcdef")))


def test_defaults_that_are_written_out_change_nothing() -> None:
    new = job(scheduling={"strategy": "SPOT", "timeout": "604800s"})
    for pool in new["jobSpec"]["workerPoolSpecs"]:
        pool["diskSpec"] = {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 100}
    assert review(job(), new) == []


def test_documents_of_two_kinds_are_not_compared() -> None:
    pipeline = yaml.safe_load((GOLDEN / "tiny-zero2.yaml").read_text())
    with pytest.raises(ReviewError, match="the old document is CustomJob and the new one pipeline"):
        review(job(), pipeline)


def test_a_label_may_be_called_description() -> None:
    old, new = job(), job()
    old["labels"], new["labels"] = {"description": "a"}, {"description": "b"}
    assert review(old, new) == ["labels.description a -> b"]
