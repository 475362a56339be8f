"""Our trainer on two nodes as the stand-in runs them, with and without pools in which nobody trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.vertex.stand_in import BUCKET, IMAGE, Rest, StandIn, start
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import LOSS_TOLERANCE, reference_losses, step_events, tiny_config

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
REDUCTION_SERVER = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
CONFIG = tiny_config(f"gs://{BUCKET}/dataset")
NUM_REDUCERS = 2
UPLOAD = """
from pathlib import Path
from google.cloud import storage
bucket, root = storage.Client().bucket({bucket!r}), Path({root!r})
result = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
for name in result:
    bucket.blob(f"dataset/{{name}}").upload_from_filename(root / name)
"""
EVALUATE = """
import json, os, time
told = json.loads(os.environ["CLUSTER_SPEC"])
print("evaluating beside", *sorted(told["cluster"]), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    stand_in = start(tmp_path_factory.mktemp("stand-in"))
    yield stand_in
    assert stand_in.stop() == 0, stand_in.log.read_text()


def pool(image: str, *, replicas: int = 1, **container: Any) -> dict[str, Any]:
    return {
        "machineSpec": {"machineType": "n1-highcpu-16"},
        "replicaCount": str(replicas),
        "containerSpec": {"imageUri": image, **container},
    }


def trainers(num_nodes: int = 2) -> list[dict[str, Any]]:
    container = {
        "command": ["python", "-m", "penstock_trainer"],
        "args": [f"--config={CONFIG.to_json()}"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    return [pool(IMAGE, **container) for _ in range(num_nodes)]


def submit(rest: Rest, name: str, pools: list[dict[str, Any]]) -> str:
    base = {"outputUriPrefix": f"gs://{BUCKET}/{name}"}
    job = {"displayName": name, "jobSpec": {"workerPoolSpecs": pools, "baseOutputDirectory": base}}
    created: str = rest.call("POST", JOBS, job)["name"]
    return created


def losses(rest: Rest, job: str) -> list[float]:
    return [event.loss for event in step_events("\n".join(rest.lines(job)))]


def test_a_reduction_server_and_an_evaluator_pool_change_no_loss(stand_in: StandIn, tmp_path: Path) -> None:
    build_dataset(tmp_path)
    uploaded = stand_in.client(UPLOAD.format(bucket=BUCKET, root=str(tmp_path)))
    assert "manifest.json" in uploaded
    rest = Rest(stand_in)
    others = [
        pool(REDUCTION_SERVER, replicas=NUM_REDUCERS),
        pool(IMAGE, command=["python", "-c", EVALUATE]),
    ]
    plain = submit(rest, "plain", trainers())
    crowded = submit(rest, "crowded", [*trainers(), *others])
    for job in (plain, crowded):
        rest.wait_until(job, "SUCCEEDED", "FAILED", seconds=90)

    expected = reference_losses(tmp_path, CONFIG)
    assert losses(rest, plain) == pytest.approx(expected, abs=LOSS_TOLERANCE), rest.lines(plain)
    assert losses(rest, crowded) == losses(rest, plain)
    # The pools were there, and knew of each other.
    pools = " ".join(f"workerpool{number}" for number in range(4))
    assert rest.lines(crowded, "workerpool3-0")[0] == f"evaluating beside {pools}"
    for reducer in range(NUM_REDUCERS):
        [said] = [json.loads(line) for line in rest.lines(crowded, f"workerpool2-{reducer}")]
        assert "reduces nothing" in said["message"]
    rest.close()
