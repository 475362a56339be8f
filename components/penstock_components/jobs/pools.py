"""Worker pools: a machine, how many of it, and the container that runs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_components.machines.catalogue import gpu_machine

MAX_ENV = 100
"""Entries that a ContainerSpec takes."""
DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
_DISK_GB = range(100, 64001)


class JobSpecError(ValueError):
    """A job spec that Vertex AI would refuse, or that would not do what it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine type with its accelerators; checked against the catalogue when it has any."""

    machine_type: str
    accelerator_type: str = ""
    """Name in the API's AcceleratorType, such as NVIDIA_L4. Empty: none."""
    accelerator_count: int = 0
    boot_disk_type: str = "pd-ssd"
    boot_disk_gb: int = 100
    """Lost with the machine: checkpoints belong into Cloud Storage."""

    def __post_init__(self) -> None:
        if bool(self.accelerator_type) != bool(self.accelerator_count):
            raise JobSpecError(
                f"accelerator_type {self.accelerator_type!r} and accelerator_count {self.accelerator_count} go together."
            )
        if self.accelerator_type:
            gpu_machine(self.machine_type, self.accelerator_type, self.accelerator_count)
        if self.boot_disk_type not in DISK_TYPES:
            raise JobSpecError(
                f"boot_disk_type {self.boot_disk_type!r} must be one of {', '.join(DISK_TYPES)}."
            )
        if self.boot_disk_gb not in _DISK_GB:
            raise JobSpecError(f"boot_disk_gb {self.boot_disk_gb} must be 100 to 64000.")

    @property
    def network_gbps(self) -> float | None:
        """Egress ceiling in Gbit/s; None for a machine without GPUs or without a sourced figure."""
        if not self.accelerator_type:
            return None
        return gpu_machine(self.machine_type, self.accelerator_type, self.accelerator_count).network_gbps

    def to_api(self) -> dict[str, Any]:
        """MachineSpec, snake_case."""
        spec: dict[str, Any] = {"machine_type": self.machine_type}
        if self.accelerator_type:
            spec |= {"accelerator_type": self.accelerator_type, "accelerator_count": self.accelerator_count}
        return spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What runs in each replica of a pool."""

    image_uri: str
    command: tuple[str, ...] = ()
    """Replaces the image's entry point; exec form, no shell."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.image_uri:
            raise JobSpecError("image_uri is empty; give the image that the pool runs.")
        if len(self.env) > MAX_ENV:
            raise JobSpecError(f"env has {len(self.env)} entries; a container takes at most {MAX_ENV}.")

    def to_api(self) -> dict[str, Any]:
        """ContainerSpec, snake_case; empty fields left out."""
        spec: dict[str, Any] = {"image_uri": self.image_uri}
        if self.command:
            spec["command"] = list(self.command)
        if self.args:
            spec["args"] = list(self.args)
        if self.env:
            spec["env"] = [{"name": name, "value": value} for name, value in sorted(self.env.items())]
        return spec


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPool:
    """Replicas of one kind."""

    machine: Machine
    replica_count: int
    container: Container

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise JobSpecError(
                f"replica_count {self.replica_count} must be at least 1; leave the pool out instead."
            )

    def to_api(self) -> dict[str, Any]:
        """WorkerPoolSpec, snake_case."""
        disk = {"boot_disk_type": self.machine.boot_disk_type, "boot_disk_size_gb": self.machine.boot_disk_gb}
        return {
            "machine_spec": self.machine.to_api(),
            "replica_count": self.replica_count,
            "disk_spec": disk,
            "container_spec": self.container.to_api(),
        }
