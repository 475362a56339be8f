"""Python packages on an executor image: from a script on disk to ranks on two nodes, by Google's clients alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.vertex.stand_in import BUCKET, EXECUTOR_IMAGE, Rest, StandIn
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, PythonPackageSpec, WorkerPoolSpec
from penstock_components.jobs.package import Launch, Package, package_script
from penstock_components.jobs.wire import to_api

JOBS = "v1/projects/demo/locations/us-central1/customJobs"

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from greeting import GREETING

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(GREETING, sys.argv[1:], os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "counted", int(total), flush=True)
dist.destroy_process_group()
"""

# {path} is uploaded to the bucket as {name}; {spec} is a CustomJobSpec. One storage client and one gapic client.
SUBMIT = """
from google.cloud import storage
from google.cloud.aiplatform_v1 import JobServiceClient
import json
storage.Client().bucket("test-bucket").blob({name!r}).upload_from_filename({path!r})
client = JobServiceClient(client_options={{"api_endpoint": "us-central1-aiplatform.googleapis.com"}})
job = {{"display_name": "packaged", "job_spec": json.loads({spec!r})}}
result = client.create_custom_job(parent="projects/demo/locations/us-central1", custom_job=job).name
"""

FROM_LOCAL_SCRIPT = """
from google.cloud import aiplatform
aiplatform.init(project="demo", location="us-central1", staging_bucket="gs://test-bucket")
job = aiplatform.CustomJob.from_local_script(
    display_name="by the SDK", script_path={path!r}, container_uri={image!r}, args=["--lr=1"], requirements=["torch>=2"]
)
job.submit()
result = job.resource_name
"""


def submit(vertex: StandIn, package: Package, args: Sequence[str] = (), *, nodes: int = 1) -> str:
    """Upload the package and create a job that runs it; the job's name."""
    name = f"packages/{package.sha256}/{package.path.name}"
    task = package.to_spec(EXECUTOR_IMAGE, f"gs://{BUCKET}/{name}", args, {"OMP_NUM_THREADS": "1"})
    spec = CustomJobSpec(worker_pool_specs=tuple(pool(task) for _ in range(nodes)))
    script = SUBMIT.format(name=name, path=str(package.path), spec=json.dumps(to_api(spec)))
    created: str = vertex.client(script)
    return created


def pool(task: PythonPackageSpec) -> WorkerPoolSpec:
    return WorkerPoolSpec(replica_count=1, python_package_spec=task)


def posted(**fields: Any) -> dict[str, Any]:
    spec = {
        "executor_image_uri": EXECUTOR_IMAGE, "package_uris": ("gs://test-bucket/absent.tar.gz",), "python_module": "train", **fields,
    }  # fmt: skip
    job_spec = CustomJobSpec(worker_pool_specs=(pool(PythonPackageSpec(**spec)),))
    return to_api(CustomJob(display_name="packaged", job_spec=job_spec), "camel")


def test_a_packaged_script_runs_as_two_ranks_on_each_of_two_nodes(
    vertex: StandIn, rest: Rest, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "greeting.py").write_text("GREETING = 'hello'")
    package = package_script(
        tmp_path / "train.py",
        requirements=["torch>=2"],
        extra_modules=[tmp_path / "greeting.py"],
        launch=Launch(processes_per_node=2),
        output_dir=tmp_path,
    )
    name = submit(vertex, package, ["--lr=1"], nodes=2)
    rest.wait_until(
        name, "SUCCEEDED", seconds=120
    )  # 15 s of two cores: four ranks and two launchers import torch
    said = {replica: rest.lines(name, replica) for replica in ("workerpool0-0", "workerpool1-0")}
    told = "hello ['--lr=1'] {} of 4 counted 4"
    assert told.format(0) in said["workerpool0-0"]
    assert f"[rank 1] {told.format(1)}" in said["workerpool0-0"]
    assert {f"[rank {rank}] {told.format(rank)}" for rank in (2, 3)} <= set(said["workerpool1-0"])


def test_the_sdk_packages_and_runs_a_local_script(vertex: StandIn, rest: Rest, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import sys; print('ran', __name__, sys.argv[1:])")
    script = FROM_LOCAL_SCRIPT.format(path=str(tmp_path / "task.py"), image=EXECUTOR_IMAGE)
    name = vertex.client(script)
    assert "pythonPackageSpec" in rest.call("GET", f"v1/{name}")["jobSpec"]["workerPoolSpecs"][0]
    rest.wait_until(name, "SUCCEEDED", seconds=60)
    assert rest.lines(name) == ["ran __main__ ['--lr=1']"]


def test_a_requirement_that_the_interpreter_lacks_fails_the_job_by_name(
    vertex: StandIn, rest: Rest, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    requirements = ["torch>=99", "a-library-of-nobody", "tomli; python_version < '3.9'"]
    package = package_script(
        tmp_path / "train.py", requirements=requirements, launch=None, output_dir=tmp_path
    )
    name = submit(vertex, package)
    message = rest.wait_until(name, "FAILED", seconds=60)["error"]["message"]
    assert "does not satisfy: a-library-of-nobody; torch>=99 (2." in message
    assert "tomli" not in message
    assert "never" not in rest.lines(name)


def test_what_is_no_package_fails_the_job_with_the_words_of_pip(rest: Rest) -> None:
    rest.session.post(
        f"https://storage.googleapis.com/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=broken.tar.gz",
        data=b"no archive",
    ).raise_for_status()
    name = rest.call("POST", JOBS, posted(package_uris=(f"gs://{BUCKET}/broken.tar.gz",)))["name"]
    assert "pip could not install broken.tar.gz" in rest.wait_until(name, "FAILED")["error"]["message"]


def test_a_package_that_is_not_in_the_bucket_fails_the_job_by_its_name(rest: Rest) -> None:
    name = rest.call("POST", JOBS, posted())["name"]
    message = rest.wait_until(name, "FAILED")["error"]["message"]
    assert "could not be started" in message
    assert "test-bucket/absent.tar.gz" in message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"executor_image_uri": "us-docker.pkg.dev/acme/none"}, "executorImageUri: image 'us-docker.pkg.dev/acme/none'"),
        ({"python_module": ""}, "pythonModule is empty"),
        ({"package_uris": ()}, "packageUris is []; give gs:// URIs"),
        ({"package_uris": ("train.tar.gz",)}, "packageUris is ['train.tar.gz']"),
    ],
)  # fmt: skip
def test_a_package_spec_that_cannot_run_is_refused_by_its_field(
    rest: Rest, fields: dict[str, Any], told: str
) -> None:
    status, message = rest.refusal("POST", JOBS, posted(**fields))
    assert status == 400
    assert f"customJob.jobSpec.workerPoolSpecs[0].pythonPackageSpec.{told}" in message
