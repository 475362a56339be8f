"""A pipeline that trains with somebody's own script, compiled with `train(command=[...])` and run on the stand-in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl

from contract.vertex.stand_in import BUCKET, IMAGE, Rest, StandIn, start
from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.resources import Resources
from penstock_components.train import train

SCRIPT = """
import os, signal, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
if rank == 1 and os.environ["PENSTOCK_RESTART"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print("rank", rank, "of", dist.get_world_size(), "sum", total.item(), "told", *sys.argv[1:], "and",
      *(f"{name}={os.environ[name]}" for name in ("RATE", "FIXED")), flush=True)
dist.destroy_process_group()
"""
RUN = """
from google.cloud import aiplatform
aiplatform.init(project="demo", location="us-central1")
job = aiplatform.PipelineJob(
    display_name="scripted", template_path={template!r}, pipeline_root="gs://{bucket}/runs",
    parameter_values={{"note": "two words", "count": 3, "rate": 0.5}},
)
job.run()
[custom_job] = aiplatform.CustomJob.list()
result = [job.state.name, custom_job.resource_name]
"""


@dsl.pipeline(name="scripted")
def scripted(note: str, count: int, rate: float) -> None:
    train(
        command=["python", "-c", SCRIPT, "--fixed=1"],
        runtime={"note": note, "count": count},
        env={"RATE": rate, "FIXED": "one"},
        resources=Resources(machine=MachineSpec(machine_type="n1-highcpu-16"), num_nodes=2),
        image=IMAGE,
        location="us-central1",
        display_name="train-scripted",
        max_restarts=1,
    )


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = start(tmp_path)
    yield stand_in
    assert stand_in.stop() == 0, stand_in.log.read_text()


def test_a_script_in_a_pipeline_gets_ranks_arguments_and_another_try(
    stand_in: StandIn, tmp_path: Path
) -> None:
    template = tmp_path / "scripted.yaml"
    compiler.Compiler().compile(scripted, str(template))
    told: Any = stand_in.client(RUN.format(template=str(template), bucket=BUCKET), timeout_seconds=120)
    state, job = told
    rest = Rest(stand_in)
    lines = [rest.lines(job, replica) for replica in ("workerpool0-0", "workerpool1-0")]
    rest.close()

    assert state == "PIPELINE_STATE_SUCCEEDED", lines
    for rank, of_node in enumerate(lines):
        mark = f"[rank {rank}] " if rank else ""
        assert (
            f"{mark}rank {rank} of 2 sum 4.0 told --fixed=1 --note=two words --count=3 and RATE=0.5 FIXED=one"
            in of_node
        )
        assert any("restart 1 of 1" in line for line in of_node)
