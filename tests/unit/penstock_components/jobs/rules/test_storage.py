"""Disks, mounts and output directories that do not work, one fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_components.jobs.messages import DiskSpec, GcsDestination, LustreMount, NfsMount
from penstock_components.jobs.rules.storage import DISK_SIZES_GB, DISK_TYPES
from unit.penstock_components.jobs.rules.specs import (
    L4,
    NETWORK,
    RESTARTS,
    findings,
    job,
    nodes,
    pool,
    refused,
    warned,
)

NFS = NfsMount(server="10.0.0.2", path="/share", mount_point="data")
LUSTRE = LustreMount(instance_ip="10.0.0.3", volume_handle="v", filesystem="fs", mount_point="data")


@pytest.mark.parametrize("kind", ["pd-extreme", "pd-balanced", "PD-SSD", "local-ssd"])
def test_a_disk_of_another_type_is_refused_and_the_types_are_named(kind: str) -> None:
    path = "worker_pool_specs[0].disk_spec.boot_disk_type"
    refused(job(pool(disk_spec=DiskSpec(boot_disk_type=kind))), path, "disk-type", kind, *DISK_TYPES)


@pytest.mark.parametrize(("size", "right"), [(50, "100"), (64001, "64000"), (-1, "100")])
def test_a_disk_has_100_to_64000_gb(size: int, right: str) -> None:
    path = "worker_pool_specs[0].disk_spec.boot_disk_size_gb"
    refused(
        job(pool(disk_spec=DiskSpec(boot_disk_size_gb=size))),
        path,
        "disk-size",
        f"{size} GB",
        f"Write {right}.",
    )


@pytest.mark.parametrize("size", [0, DISK_SIZES_GB[0], DISK_SIZES_GB[-1]])
def test_the_smallest_the_largest_and_the_default_disk_are_taken(size: int) -> None:
    assert findings(job(pool(disk_spec=DiskSpec(boot_disk_size_gb=size)))) == []


@pytest.mark.parametrize(
    ("field", "value", "rule", "words"),
    [
        ("server", "", "mount-server", ("missing", "10.76.0.10")),
        ("server", "nfs.example.internal", "mount-server", ("no IP address",)),
        ("path", "share", "nfs-path", ("does not begin with /", "Write /share.")),
        ("mount_point", "", "mount-point", ("names no folder",)),
        ("mount_point", "/mnt/nfs/data", "mount-point", ("Write data,", "/mnt/nfs/data")),
        ("mount_point", "../etc", "mount-point", ("not below /mnt/nfs",)),
    ],
)
def test_an_nfs_share_needs_address_path_and_folder(
    field: str, value: str, rule: str, words: tuple[str, ...]
) -> None:
    spec = job(pool(nfs_mounts=(replace(NFS, **{field: value}),)), network=NETWORK)
    refused(spec, f"worker_pool_specs[0].nfs_mounts[0].{field}", rule, *words)


def test_a_public_address_of_a_share_is_a_warning() -> None:
    spec = job(pool(nfs_mounts=(replace(NFS, server="8.8.8.8"),)), network=NETWORK)
    warned(spec, "worker_pool_specs[0].nfs_mounts[0].server", "mount-server-public", "no private address")


@pytest.mark.parametrize("field", ["volume_handle", "filesystem"])
def test_a_lustre_mount_needs_all_four_fields(field: str) -> None:
    spec = job(pool(lustre_mounts=(replace(LUSTRE, **{field: ""}),)), network=NETWORK)
    refused(spec, f"worker_pool_specs[0].lustre_mounts[0].{field}", "required", "all of its four fields")


def test_two_shares_cannot_be_seen_at_one_folder() -> None:
    spec = job(pool(nfs_mounts=(NFS, replace(NFS, path="/other"))), network=NETWORK)
    path = "worker_pool_specs[0].nfs_mounts[1].mount_point"
    refused(spec, path, "mount-point-twice", "/mnt/nfs/data is taken by mount 0")


def test_nfs_and_lustre_have_folders_of_their_own() -> None:
    assert findings(job(pool(nfs_mounts=(NFS,), lustre_mounts=(LUSTRE,)), network=NETWORK)) == []


def test_a_share_without_a_network_is_told_once_for_all_pools() -> None:
    spec = job(pool(nfs_mounts=(NFS,)), pool(nfs_mounts=(NFS,)))
    refused(spec, "worker_pool_specs[0].nfs_mounts", "mount-network", "network", "psc_interface_config")


def test_lustre_without_a_network_is_a_warning() -> None:
    warned(
        job(pool(lustre_mounts=(LUSTRE,))), "worker_pool_specs[0].lustre_mounts", "mount-network", "no way"
    )


@pytest.mark.parametrize(
    ("prefix", "fix"),
    [
        ("/gcs/bucket/runs/a", "Write gs://bucket/runs/a."),
        ("s3://bucket/a", "Write gs://bucket/path."),
        ("bucket/a", "Write gs://bucket/path."),
        ("gs://", "Write gs://bucket/path."),
        ("", "Write gs://bucket/path."),
    ],
)
def test_an_output_directory_is_a_uri_in_cloud_storage(prefix: str, fix: str) -> None:
    spec = job(base_output_directory=GcsDestination(output_uri_prefix=prefix))
    refused(spec, "base_output_directory.output_uri_prefix", "output-directory", fix)


@pytest.mark.parametrize("context", [{"strategy": "fsdp-full"}, {"through_gcpc": True}])
def test_a_trainer_on_several_nodes_without_output_directory_is_warned_that_it_cannot_resume(
    context: dict[str, object],
) -> None:
    spec = replace(nodes(L4, 2), base_output_directory=None)
    warned(spec, "base_output_directory", "output-directory-missing", "AIP_CHECKPOINT_DIR", "same", **context)
    assert findings(spec) == []


def test_spot_without_output_directory_is_a_warning() -> None:
    spec = job(scheduling=replace(RESTARTS, strategy="SPOT"))
    warned(spec, "base_output_directory", "output-directory-missing", "Spot machines are taken away")


def test_what_a_run_decides_is_not_judged_before_it() -> None:
    spot = job(scheduling=replace(RESTARTS, strategy="SPOT"))
    share = job(pool(nfs_mounts=(NFS,)))
    trainer = replace(nodes(L4, 2), base_output_directory=None)
    assert findings(spot, unknown=frozenset({"scheduling.strategy"})) == []
    assert findings(share, unknown=frozenset({"network"})) == []
    assert findings(share, unknown=frozenset({"psc_interface_config"})) == []
    for path in ("base_output_directory", "base_output_directory.output_uri_prefix"):
        assert findings(trainer, unknown=frozenset({path}), strategy="ddp") == []
