"""The messages of a CustomJob, field by field as in google.cloud.aiplatform.v1, as frozen dataclasses.

They hold what was written and check nothing: `rules` judges them, and `wire` reads and writes them. Defaults are the
proto's, so a field left out and a field at its default are the same on the wire. Enumerations are their names; the empty
text is the proto's UNSPECIFIED. Durations have the microseconds of datetime.timedelta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

ACCELERATOR_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "ACCELERATOR_TYPE_UNSPECIFIED": 0,
        "NVIDIA_TESLA_K80": 1,
        "NVIDIA_TESLA_P100": 2,
        "NVIDIA_TESLA_V100": 3,
        "NVIDIA_TESLA_P4": 4,
        "NVIDIA_TESLA_T4": 5,
        "TPU_V2": 6,
        "TPU_V3": 7,
        "NVIDIA_TESLA_A100": 8,
        "NVIDIA_A100_80GB": 9,
        "TPU_V4_POD": 10,
        "NVIDIA_L4": 11,
        "TPU_V5_LITEPOD": 12,
        "NVIDIA_H100_80GB": 13,
        "NVIDIA_H100_MEGA_80GB": 14,
        "NVIDIA_H200_141GB": 15,
        "NVIDIA_B200": 16,
        "NVIDIA_GB200": 17,
        "NVIDIA_RTX_PRO_6000": 18,
    }
)
STRATEGIES: Mapping[str, int] = MappingProxyType(
    {"STRATEGY_UNSPECIFIED": 0, "ON_DEMAND": 1, "LOW_COST": 2, "STANDARD": 3, "SPOT": 4, "FLEX_START": 6}
)
RESERVATION_AFFINITIES: Mapping[str, int] = MappingProxyType(
    {"TYPE_UNSPECIFIED": 0, "NO_RESERVATION": 1, "ANY_RESERVATION": 2, "SPECIFIC_RESERVATION": 3}
)


def enumeration(values: Mapping[str, int]) -> Any:
    """A field that holds a name of `values`; empty by default."""
    return field(default="", metadata={"enum": values})


def int64() -> Any:
    """A field whose JSON is a text of digits, as proto3 writes 64-bit integers."""
    return field(default=0, metadata={"int64": True})


class Message:
    """A message of the API. Its subclasses are dataclasses whose field names are the proto's, in snake_case."""

    __slots__ = ()
    ONE_OF: ClassVar[tuple[str, ...]] = ()
    """Fields of which at most one may be set."""
    OUTPUT_ONLY: ClassVar[tuple[str, ...]] = ()
    """Fields that the service sets; they may stand in what it has returned, and are left out when read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservationAffinity(Message):
    """Which Compute Engine reservations a machine may take."""

    reservation_affinity_type: str = enumeration(RESERVATION_AFFINITIES)
    key: str = ""
    """For SPECIFIC_RESERVATION: compute.googleapis.com/reservation-name."""
    values: tuple[str, ...] = ()
    """projects/P/zones/Z/reservations/R."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpec(Message):
    """One machine."""

    machine_type: str = ""
    accelerator_type: str = enumeration(ACCELERATOR_TYPES)
    accelerator_count: int = 0
    gpu_partition_size: str = ""
    """Of a multi-instance GPU, such as 1g.10gb; accelerator_count is then 1."""
    tpu_topology: str = ""
    """Such as 2x2x1; TPU v5e, v6e and 7x have it in place of an accelerator."""
    reservation_affinity: ReservationAffinity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpec(Message):
    """The boot disk. There is no other: what is on it is lost with the machine."""

    boot_disk_type: str = ""
    boot_disk_size_gb: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NfsMount(Message):
    """An NFS share, seen at /mnt/nfs/<mount_point>."""

    server: str = ""
    """Private IP address."""
    path: str = ""
    """Of the share on the server, from its root."""
    mount_point: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LustreMount(Message):
    """A Managed Lustre instance, seen at /mnt/lustre/<mount_point>."""

    instance_ip: str = ""
    volume_handle: str = ""
    filesystem: str = ""
    mount_point: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvVar(Message):
    """One environment variable; its value is stored in clear in the job."""

    name: str = ""
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSpec(Message):
    """A container: an image and how it is started, in exec form."""

    image_uri: str = ""
    command: tuple[str, ...] = ()
    """Replaces the image's entry point."""
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonPackageSpec(Message):
    """Python source distributions, installed into one of Google's prebuilt images and run as a module."""

    executor_image_uri: str = ""
    package_uris: tuple[str, ...] = ()
    python_module: str = ""
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPoolSpec(Message):
    """Replicas of one kind. An empty one holds its place among the pools."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("container_spec", "python_package_spec")

    machine_spec: MachineSpec | None = None
    replica_count: int = int64()
    nfs_mounts: tuple[NfsMount, ...] = ()
    lustre_mounts: tuple[LustreMount, ...] = ()
    disk_spec: DiskSpec | None = None
    container_spec: ContainerSpec | None = None
    python_package_spec: PythonPackageSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling(Message):
    """When the job's machines are had, and what happens when one fails. One strategy for all pools."""

    timeout: timedelta | None = None
    """Longest running time; the service's default and limit is 7 days."""
    restart_job_on_worker_restart: bool = False
    strategy: str = enumeration(STRATEGIES)
    disable_retries: bool = False
    max_wait_duration: timedelta | None = None
    """FLEX_START only: how long to wait for machines; 0 waits for ever, the service's default is a day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DnsPeeringConfig(Message):
    """A DNS domain of a network of yours that replicas can resolve over a PSC interface."""

    domain: str = ""
    target_project: str = ""
    target_network: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PscInterfaceConfig(Message):
    """Private Service Connect interface: the job reaches your network through a network attachment in it."""

    network_attachment: str = ""
    dns_peering_configs: tuple[DnsPeeringConfig, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsDestination(Message):
    """A place in Cloud Storage."""

    output_uri_prefix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomJobSpec(Message):
    """What a CustomJob runs, and where."""

    persistent_resource_id: str = ""
    worker_pool_specs: tuple[WorkerPoolSpec, ...] = ()
    scheduling: Scheduling | None = None
    service_account: str = ""
    network: str = ""
    """VPC peering: projects/<project number>/global/networks/<name>; of the host project for a Shared VPC."""
    reserved_ip_ranges: tuple[str, ...] = ()
    """Names of ranges that were allocated for the peering, not addresses."""
    psc_interface_config: PscInterfaceConfig | None = None
    base_output_directory: GcsDestination | None = None
    protected_artifact_location_id: str = ""
    tensorboard: str = ""
    enable_web_access: bool = False
    """An interactive shell in each replica; nothing to do with networks."""
    enable_dashboard_access: bool = False
    experiment: str = ""
    experiment_run: str = ""
    models: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EncryptionSpec(Message):
    """A customer-managed key."""

    kms_key_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomJob(Message):
    """A job and its name."""

    OUTPUT_ONLY: ClassVar[tuple[str, ...]] = (
        "name", "state", "create_time", "start_time", "end_time", "update_time", "error", "web_access_uris",
        "satisfies_pzs", "satisfies_pzi",
    )  # fmt: skip

    display_name: str = ""
    job_spec: CustomJobSpec | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    encryption_spec: EncryptionSpec | None = None
