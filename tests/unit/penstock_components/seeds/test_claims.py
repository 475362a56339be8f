"""What the seeds claim of other people's programs, tried on the installed ones: docs/seeds.md refers to each."""

from __future__ import annotations

import fnmatch
import json
import subprocess
from pathlib import Path

import pytest
import torch
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform import hyperparameter_tuning
from google.cloud.aiplatform.utils import worker_spec_utils
from google.cloud.aiplatform_v1.types import ContainerSpec, CustomJob, DiskSpec, MachineSpec, WorkerPoolSpec
from google.protobuf.json_format import ParseError
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers.models.auto import modeling_auto

A100_NODE = {
    "machine_type": "a2-highgpu-8g", "accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": 8,
}  # fmt: skip


# Fields


@pytest.mark.parametrize(
    "field",
    [
        "spot",
        "use_spot",
        "network",
        "reserved_ip_ranges",
        "enable_web_access",
        "machine_type",
        "container_uri",
    ],
)
def test_a_worker_pool_has_no_such_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown field for WorkerPoolSpec: {field}"):
        WorkerPoolSpec({field: None})


@pytest.mark.parametrize("field", ["persistent_disk_size_gb", "persistent_disk_type"])
def test_a_replica_has_no_disk_but_its_boot_disk(field: str) -> None:
    assert set(DiskSpec.meta.fields) == {"boot_disk_type", "boot_disk_size_gb"}
    with pytest.raises(ValueError, match=f"Unknown field for DiskSpec: {field}"):
        DiskSpec({field: None})


def test_a_field_written_in_two_cases_is_none() -> None:
    pool = {"diskSpec": {"bootDiskSize_gb": 200}}
    with pytest.raises(ParseError, match='no field named "bootDiskSize_gb"'):
        CustomJob.from_json(json.dumps({"jobSpec": {"workerPoolSpecs": [pool]}}))


def test_a_container_takes_no_reference_to_a_secret() -> None:
    environment = ContainerSpec.meta.fields["env"].message
    assert set(environment.meta.fields) == {"name", "value"}


def test_python_clients_take_snake_case_only() -> None:
    with pytest.raises(ValueError, match="Unknown field for WorkerPoolSpec: replicaCount"):
        WorkerPoolSpec({"replicaCount": 1})
    with pytest.raises(ValueError, match="Unknown field for MachineSpec: machineType"):
        MachineSpec({"machineType": "a2-highgpu-8g"})


# The SDK


def test_the_sdk_puts_one_of_four_replicas_into_pool_0() -> None:
    job = worker_spec_utils._DistributedTrainingSpec.chief_worker_pool(replica_count=4, **A100_NODE)
    assert [pool["replica_count"] for pool in job.pool_specs] == [1, 3]


def test_the_sdk_itself_refuses_a_second_primary() -> None:
    primaries = worker_spec_utils._WorkerPoolSpec(replica_count=4, machine_type="n1-standard-4")
    with pytest.raises(ValueError, match="replica count cannot be greater than 1"):
        _ = worker_spec_utils._DistributedTrainingSpec(chief_spec=primaries).pool_specs


def test_a_job_has_no_name_before_it_is_created() -> None:
    job = aiplatform.CustomJob(
        display_name="not sent",
        worker_pool_specs=[{"machine_spec": A100_NODE, "replica_count": 1}],
        project="wren-lab",
        location="europe-west4",
        staging_bucket="gs://wren-staging",
        credentials=AnonymousCredentials(),
    )
    with pytest.raises(RuntimeError, match="has not been created"):
        _ = job.resource_name


def test_a_discrete_parameter_needs_a_scale() -> None:
    with pytest.raises(TypeError, match="scale"):
        hyperparameter_tuning.DiscreteParameterSpec(values=[16, 32])
    hyperparameter_tuning.DiscreteParameterSpec(values=[16, 32], scale="unspecified")


# Scripts


def test_a_command_in_exec_form_sees_no_shell_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    told = subprocess.run(["echo", "--master_addr=$MASTER_ADDR"], capture_output=True, text=True, check=True)
    assert told.stdout == "--master_addr=$MASTER_ADDR\n"


def test_torch_neither_saves_to_nor_loads_from_cloud_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="gs://wren-owls does not exist"):
        torch.save({}, "gs://wren-owls/model.pt")
    with pytest.raises(FileNotFoundError):
        torch.load("gs://wren-owls/model.pt")
    assert not list(tmp_path.iterdir())


def test_a_save_into_a_directory_is_an_error(tmp_path: Path) -> None:
    """AIP_MODEL_DIR ends in a slash: it names a directory, and in Cloud Storage at that."""
    with pytest.raises((RuntimeError, IsADirectoryError)):
        torch.save({}, f"{tmp_path}/")


def test_a_resume_that_looks_for_other_names_finds_nothing() -> None:
    assert not fnmatch.fnmatch("step_500", "epoch_*_step_*")


def test_an_iterator_made_in_every_step_yields_the_first_batch_for_ever() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    assert [next(iter(loader))[0].tolist() for _ in range(3)] == [[0, 1]] * 3


def test_a_sampler_that_is_not_told_the_epoch_repeats_the_order_but_no_sample() -> None:
    dataset = TensorDataset(torch.arange(12))
    samplers: list[DistributedSampler[int]]
    samplers = [DistributedSampler(dataset, num_replicas=2, rank=rank) for rank in range(2)]
    epochs = [[list(sampler) for sampler in samplers] for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert sorted(epochs[0][0] + epochs[0][1]) == list(range(12))
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in samplers] != epochs[0]


def test_models_of_images_and_text_are_no_causal_language_models() -> None:
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    images_and_text = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    qwen = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
    assert qwen <= images_and_text
    assert not qwen & causal


def test_torch_is_built_without_mpi() -> None:
    assert not torch.distributed.is_mpi_available()


# Arithmetic


def test_zero_2_over_8_ranks_saves_77_percent_of_model_states() -> None:
    """The seeds' own formula, 2P + 2P/N + 12P/N bytes (Rajbhandari et al., 2020), against their 40 %."""
    parameters, ranks = 10e9, 8
    alone = (2 + 2 + 12) * parameters
    shared = 2 * parameters + (2 + 12) * parameters / ranks
    assert alone == 160e9
    assert shared == 37.5e9
    assert round(1 - shared / alone, 2) == 0.77


def test_the_arr_coc_model_states_are_more_than_the_seeds_count() -> None:
    """Weights, gradients, masters and moments of all that is trained; the seeds leave out most of the small modules'."""
    base, scorers, adapter, texture = 2e9, 3 * 100e6, 50e6, 13 * 256 * 256 * 4
    told = 2 * base + 12 * base + 2 * scorers + 2 * adapter + texture
    trained = base + scorers + adapter
    assert texture == 3_407_872
    assert round(told / 1e9, 1) == 28.7
    assert round(16 * trained / 1e9, 1) == 37.6
    assert round((2 + 14 / 8) * trained / 1e9, 1) == 8.8
