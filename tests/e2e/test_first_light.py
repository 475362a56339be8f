"""Compiled pipelines run end to end on the stand-in: what a user is promised, asserted on one scenario."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Five pipelines on a busy machine; alone on two cores they take two to three minutes.
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
STEPS, INTERVAL = 64, 8  # of small_recipes
SETTINGS = """
project = "demo"
location = "us-central1"
bucket = "demo-penstock"
allow_tags = true
[images]
components = "us-central1-docker.pkg.dev/demo/penstock/components:0.1.0"
trainer = "us-central1-docker.pkg.dev/demo/penstock/trainer:0.1.0"
serving = "us-docker.pkg.dev/vertex-ai/vertex-vision-model-garden-dockers/pytorch-vllm-serve:20251205_0916_RC01"
[parameters]
source_uri = "gs://demo-penstock/raw/a path with spaces.jsonl"
"""


# A user behind a company's proxy has these; none of them may be asked.
FOREIGN_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def namespace_prefix() -> list[str]:
    """What starts a program in a network namespace of its own; empty where that is forbidden."""
    prefix = ["unshare", "-rn", sys.executable, str(HERE / "loopback_only.py")]
    if shutil.which("unshare") is None:
        return []
    return prefix if subprocess.run([*prefix, "/bin/true"], capture_output=True).returncode == 0 else []


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp("a work dir")
    (work / "penstock.toml").write_text(SETTINGS)
    command = [
        *namespace_prefix(),
        sys.executable,
        str(HERE / "scenario.py"),
        str(work),
        str(work / "penstock.toml"),
    ]
    environment = os.environ | dict.fromkeys(FOREIGN_PROXIES, "http://10.255.255.1:3128")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((work / "seen.json").read_text()) | {"work": work}


def test_a_run_ends_with_a_registered_champion(seen: Any) -> None:
    first = seen["first"]
    assert first["exit_code"] == 0, first["output"]
    assert first["state"] == "PIPELINE_STATE_SUCCEEDED"
    assert set(first["tasks"].values()) == {"SUCCEEDED"}
    assert first["registered"]["aliases"] == "challenger,champion,default"
    assert first["registered"]["resource_name"].endswith("/models/small-fsdp-full@1")


def test_the_summary_tells_what_the_run_came_to(seen: Any) -> None:
    output = seen["reduced"]["output"]
    for told in ("custom-training-job", "loss", "goodput", "bits per byte", "unigram", "registered", "aliases", "brings nothing",
                 "reduces nothing", ".html"):  # fmt: skip
        assert told in output, f"{told!r} is not in:\n{output}"


def test_the_report_is_on_this_machine(seen: Any) -> None:
    report = seen["work"] / "reports" / "first.html"
    assert "</svg>" in report.read_text()


def test_an_equal_model_is_registered_but_does_not_become_the_champion(seen: Any) -> None:
    again = seen["killed"]
    assert again["gate"]["register"] is True
    assert again["gate"]["promote"] is False
    assert again["registered"]["aliases"] == "challenger"
    assert again["models"] == {"1": ["champion", "default"], "2": ["challenger"]}


def test_staging_comes_from_the_cache_and_training_never_does(seen: Any) -> None:
    assert seen["killed"]["tasks"]["stage-data"] == "SKIPPED"
    assert seen["killed"]["tasks"]["custom-training-job"] == "SUCCEEDED"


@pytest.mark.parametrize(("disturbed", "undisturbed"), [("killed", "first"), ("terminated", "reduced")])
def test_a_disturbed_run_ends_with_the_losses_of_the_undisturbed_one(
    seen: Any, disturbed: str, undisturbed: str
) -> None:
    assert seen[disturbed]["exit_code"] == 0, seen[disturbed]["output"]
    expected = {step: losses[-1] for step, losses in seen[undisturbed]["losses"].items()}
    assert {step: losses[-1] for step, losses in seen[disturbed]["losses"].items()} == expected
    assert len(expected) == STEPS
    assert any("the whole job restarts" in line for line in seen[disturbed]["lines"])
    assert any("continuing from step" in line for line in seen[disturbed]["lines"])


@pytest.mark.parametrize("disturbed", ["killed", "terminated"])
def test_a_restarted_job_continues_right_after_its_last_checkpoint(seen: Any, disturbed: str) -> None:
    steps: list[list[int]] = [[]]
    for line in seen[disturbed]["lines"]:
        if found := re.search(r"continuing from step (\d+)", line):
            steps.append([int(found[1])])
        elif found := re.match(rf"step (\d+)/{STEPS} ", line):
            steps[-1].append(int(found[1]))
    before, (checkpoint, *after) = steps
    # The last save may not have come to its manifest, and the one before waited for it no longer than until the next.
    assert checkpoint <= before[-1] <= checkpoint + 2 * INTERVAL
    assert after == list(range(checkpoint + 1, STEPS + 1))


def test_two_pipelines_at_once_on_one_stand_in_finish(seen: Any) -> None:
    assert seen["first"]["exit_code"] == 0, seen["first"]["output"]
    assert seen["reduced"]["exit_code"] == 0, seen["reduced"]["output"]


def test_the_job_has_the_pools_of_the_recipe_in_order(seen: Any) -> None:
    [pools] = seen["reduced"]["pools"]
    assert [pool["replicas"] for pool in pools] == [1, 1, 2]
    assert [pool["machine"] for pool in pools] == ["g2-standard-12", "g2-standard-12", "n1-highcpu-16"]
    assert pools[2]["image"] == "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
    [pools] = seen["first"]["pools"]
    assert [pool["replicas"] for pool in pools] == [1, 1]


def test_a_trainer_that_fails_registers_nothing_and_its_last_lines_are_shown(seen: Any) -> None:
    broken = seen["broken"]
    assert broken["exit_code"] == 1
    assert broken["state"] == "PIPELINE_STATE_FAILED"
    assert "optim.warmup_steps = 5 is not valid" in broken["output"]
    assert "The replica workerpool" in broken["output"]
    assert broken["registered"] == {}
    assert "champion" in broken["models"]["1"]
    assert broken["tasks"]["record-status"] == "SUCCEEDED"
    assert any(name.endswith("/status.json") for name in broken["objects"])


def test_a_stranger_with_the_stock_sdk_sees_everything_over_grpc_and_rest(seen: Any) -> None:
    for transport in ("grpc", "rest"):
        told = seen["outsider"][transport]
        assert sorted(told["pipelines"]) == ["broken", "first", "killed", "reduced", "terminated"]
        assert sorted(told["custom_jobs"]) == ["train-small-fsdp-full"] * 3 + ["train-small-zero2"] * 2
        assert sorted(told["models"]) == ["small-fsdp-full", "small-zero2"]


def test_without_a_token_the_server_answers_401(seen: Any) -> None:
    assert seen["unauthenticated"] == 401


def test_nothing_asked_for_the_world_outside(seen: Any) -> None:
    assert seen["status"]["refused"] == []


def test_the_whole_scenario_ran_where_there_is_no_network_but_loopback(seen: Any) -> None:
    if not namespace_prefix():
        pytest.skip("this system forbids user namespaces, so no network can be taken away here")
    assert seen["first"]["exit_code"] == 0


def test_logs_shows_the_lines_of_one_replica(seen: Any) -> None:
    assert "workerpool0-0" in seen["logs"]
    assert "workerpool1-0" not in seen["logs"]
