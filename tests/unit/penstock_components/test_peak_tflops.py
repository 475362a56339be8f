"""The yardstick of utilisation that `train` takes from the catalogue."""

import json
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl

from penstock_components.jobs.messages import MachineSpec
from penstock_components.jobs.resources import Resources
from penstock_components.machines.catalogue import peak_tflops
from penstock_components.train import train
from penstock_trainer.contract.config import EngineConfig, JobConfig, ObserveConfig

H200 = MachineSpec(machine_type="a3-ultragpu-8g", accelerator_type="NVIDIA_H200_141GB", accelerator_count=8)
IN_BF16 = JobConfig(engine=EngineConfig(precision="bf16"))


def compiled_peak(config: JobConfig, machine: MachineSpec) -> float:
    @dsl.pipeline(name="trained")
    def trained() -> None:
        train(
            config,
            resources=Resources(machine=machine, num_nodes=1),
            image="europe-docker.pkg.dev/p/r/trainer:1",
            location="europe-west4",
            display_name="train",
        )

    told: Any = json_format.MessageToDict(trained.pipeline_spec)
    given = told["root"]["dag"]["tasks"]["custom-training-job"]["inputs"]["parameters"]
    (pool,) = given["worker_pool_specs"]["runtimeValue"]["constant"]
    (argument,) = pool["container_spec"]["args"]
    peak: float = json.loads(argument.removeprefix("--config="))["observe"]["peak_tflops"]
    return peak


def test_the_peak_follows_from_machine_and_precision() -> None:
    assert compiled_peak(IN_BF16, H200) == 989.5


def test_a_peak_that_the_author_gave_stays() -> None:
    config = replace(IN_BF16, observe=ObserveConfig(peak_tflops=790.0))
    assert compiled_peak(config, H200) == 790.0


@pytest.mark.parametrize(
    ("config", "machine"), [(JobConfig(), H200), (IN_BF16, MachineSpec(machine_type="n2-standard-8"))]
)
def test_where_no_peak_is_known_no_utilisation_is_claimed(config: JobConfig, machine: MachineSpec) -> None:
    assert compiled_peak(config, machine) == 0


def test_a_t4_has_no_bf16() -> None:
    assert peak_tflops("NVIDIA_TESLA_T4", "bf16") == 0
    assert peak_tflops("NVIDIA_TESLA_T4", "fp16") == 65
