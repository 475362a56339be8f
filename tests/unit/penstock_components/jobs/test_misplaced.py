"""Fields that people look for and the API does not have: each is told what does the job for real."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_components.jobs import messages, study
from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec, Message
from penstock_components.jobs.misplaced import _BY_NAME
from penstock_components.jobs.reader import read
from penstock_components.jobs.schema import fields_of


def found(pool: dict[str, Any], **fields: Any) -> tuple[Finding, ...]:
    return read(CustomJobSpec, {"worker_pool_specs": [pool], **fields}, case="snake").findings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("spot", True, ("no Spot for one pool", "scheduling.strategy", "SPOT")),
        ("preemptible", True, ("scheduling.strategy",)),
        ("persistent_disk_size_gb", 500, ("no persistent disks", "/gcs", "boot_disk_size_gb")),
        ("volumes", [], ("nfs_mounts", "lustre_mounts", "/gcs/<bucket>")),
        ("volume_mounts", [], ("nfs_mounts",)),
        ("pvc", "claim", ("nfs_mounts",)),
        ("shm_size", "16Gi", ("set_sharing_strategy",)),
        ("gpus", 8, ("accelerator_type", "accelerator_count")),
        ("container_uri", "image", ("container_spec: {image_uri",)),
        ("image_pull_policy", "Always", ("digest",)),
        ("entrypoint", ["train"], ("container_spec.command",)),
        ("value_from", {}, ("SecretEnvVar", "Secret Manager")),
        ("secret_key_ref", {}, ("Secret Manager",)),
        ("restart_policy", "Never", ("restart_job_on_worker_restart",)),
        ("max_restarts", 3, ("torchrun --max-restarts", "set_retry")),
        ("retry", 3, ("disable_retries",)),
        ("priority", 1, ("FLEX_START",)),
        ("node_selector", {}, ("reservation_affinity",)),
        ("tolerations", [], ("reservation_affinity",)),
        ("region", "us-central1", ("--region",)),
        ("location", "us-central1", ("--region",)),
        ("project", "p", ("--project",)),
        ("reservations", [], ("SPECIFIC_RESERVATION", "compute.googleapis.com/reservation-name")),
        ("max_run_duration", "3600s", ("scheduling.timeout",)),
        ("max_wait", "3600s", ("max_wait_duration",)),
        ("min_replica_count", 1, ("replica_count",)),
        ("subnetwork", "s", ("psc_interface_config",)),
        ("role", "worker", ("0 primary, 1 workers",)),
        ("reduction_server_replica_count", 4, ("index 2",)),
        ("requirements", ["torch"], ("package_uris",)),
        ("memory", "64Gi", ("machine_type",)),
        ("working_dir", "/app", ("WORKDIR",)),
    ],
)
def test_a_field_that_does_not_exist_is_told_what_does_its_job(
    name: str, value: Any, words: tuple[str, ...]
) -> None:
    (finding,) = found({name: value})
    assert finding.path == f"worker_pool_specs[0].{name}"
    assert finding.severity == "error"
    assert [word for word in words if word not in finding.told()] == [], finding.told()


def test_settings_of_the_job_in_a_pool_are_told_their_place() -> None:
    for name, value in (("network", "n"), ("enable_web_access", False), ("reserved_ip_ranges", [])):
        (finding,) = found({name: value})
        assert finding.fix == f"It is a field of CustomJobSpec: {name}."


def test_advice_never_hides_a_field_that_the_api_has() -> None:
    kinds = [
        kind
        for module in (messages, study)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message)
    ]
    real = {field.name for kind in kinds if kind is not Message for field in fields_of(kind)}
    assert real & set(_BY_NAME) == set()
