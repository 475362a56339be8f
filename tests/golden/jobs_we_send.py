"""CustomJobs as our typed specs make them, one for each way in which machines are had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJob,
    DiskSpec,
    DnsPeeringConfig,
    MachineSpec,
    NfsMount,
    PscInterfaceConfig,
    ReservationAffinity,
)
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.resources import Resources, VpcPeering
from penstock_components.jobs.rules.context import Context

CONTAINER = ContainerSpec(
    image_uri="europe-docker.pkg.dev/example/images/trainer@sha256:" + "0123456789abcdef" * 4,
    command=("python", "-m", "penstock_trainer"),
    args=('--config={"engine":{"strategy":"ddp"}}', "--data.uri=gs://example/tokens"),
)


def a100_reduction_server() -> CustomJob:
    """Eight nodes of 8 A100 with DDP, and as many reducers as their bandwidth asks for."""
    return _job(
        Resources(machine="a2-highgpu-8g", num_nodes=8, reduction_server=ReductionServer(replica_count=25))
    )


def h100_flex_start() -> CustomJob:
    """Four nodes of 8 H100 that start when all are there."""
    return _job(
        Resources(
            machine="a3-highgpu-8g",
            num_nodes=4,
            strategy="FLEX_START",
            max_wait=timedelta(hours=12),
            timeout=timedelta(days=2),
        )
    )


def h200_spot_psc_nfs() -> CustomJob:
    """Two Spot nodes of 8 H200 that reach an NFS share over a PSC interface."""
    attachment = "projects/example/regions/europe-west4/networkAttachments/training"
    peering = DnsPeeringConfig(domain="nfs.internal.", target_project="example", target_network="storage")
    return _job(
        Resources(
            machine="a3-ultragpu-8g",
            num_nodes=2,
            strategy="SPOT",
            disk=DiskSpec(boot_disk_type="hyperdisk-balanced", boot_disk_size_gb=500),
            network=PscInterfaceConfig(network_attachment=attachment, dns_peering_configs=(peering,)),
            nfs_mounts=(NfsMount(server="10.0.0.2", path="/tokens", mount_point="tokens"),),
        )
    )


def gb200_reserved() -> CustomJob:
    """Two nodes of 4 GB200 out of a reservation, in a peered network."""
    reservation = ReservationAffinity(
        reservation_affinity_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=("projects/example/zones/us-central1-a/reservations/training",),
    )
    machine = MachineSpec(
        machine_type="a4x-highgpu-4g",
        accelerator_type="NVIDIA_GB200",
        accelerator_count=4,
        reservation_affinity=reservation,
    )
    network = VpcPeering(
        network="projects/123/global/networks/training", reserved_ip_ranges=("vertex-range",)
    )
    return _job(Resources(machine=machine, num_nodes=2, network=network), location="us-central1")


def _job(resources: Resources, location: str = "europe-west4") -> CustomJob:
    return resources.custom_job(
        CONTAINER,
        display_name="pretrain",
        base_output_directory="gs://example/runs/pretrain",
        context=Context(location=location, strategy="ddp"),
    )


JOBS: Mapping[str, Callable[[], CustomJob]] = {
    "a100-reduction-server": a100_reduction_server,
    "h100-flex-start": h100_flex_start,
    "h200-spot-psc-nfs": h200_spot_psc_nfs,
    "gb200-reserved": gb200_reserved,
}
