"""Machines with GPUs: which GPUs each carries and in which counts, its memory, its network and how it is had."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock_components.machines.names import unknown_machine
from penstock_components.machines.tables import MachineError, tables

Architecture = Literal["x86_64", "arm64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMachine:
    """One machine type with one accelerator type."""

    machine_type: str
    accelerator_type: str
    accelerator_counts: tuple[int, ...]
    """The only counts that the pair takes."""
    gpu_memory_gb: int
    vcpus: int
    memory_gb: float
    network_gbps: float | None
    """Egress ceiling of one machine in Gbit/s; None where no first-hand source gives it."""
    gpu_fabric: str
    """How GPUs of different machines reach each other."""
    architecture: Architecture = "x86_64"
    """Of its CPUs, and so of the images that run on it."""
    needs_reservation: bool = False
    """Vertex AI trains on it only out of a reservation."""
    advised_consumption: str = ""
    """How Google says it is best had, or can only be had; empty where nothing is said."""
    is_only_preemptible: bool = False
    """Compute Engine has it as Spot or Flex-start, and in no other way."""
    default_boot_disk: str = "pd-ssd"
    end_of_support: str = ""
    """Day (ISO 8601) on which Google ends support for the accelerator; empty where none is announced."""

    @property
    def has_gpudirect(self) -> bool:
        """Whether GPUs talk past the host; such machines bring their own NCCL network plugin."""
        return "GPUDirect" in self.gpu_fabric


@functools.cache
def gpu_machines() -> tuple[GpuMachine, ...]:
    """Every pair of machine type and accelerator type, in the file's order."""
    return tuple(
        GpuMachine(**{**row, "accelerator_counts": tuple(row["accelerator_counts"])})
        for row in tables()["gpu_machines"]
    )


def gpu_machine(machine_type: str, accelerator_type: str, accelerator_count: int) -> GpuMachine:
    """The catalogue's row.

    Raises MachineError, which says which machine type or accelerator was probably meant, what the machine carries and in
    which counts, and what carries the accelerators that were asked for.
    """
    carried = [row for row in gpu_machines() if row.machine_type == machine_type]
    if not carried:
        raise MachineError(
            f"{unknown_machine(machine_type, kind='GPU')}{_carriers(accelerator_type, accelerator_count)}"
        )
    for row in carried:
        if row.accelerator_type == accelerator_type and accelerator_count in row.accelerator_counts:
            return row
    raise MachineError(
        f"{machine_type} does not carry {accelerator_count} x {accelerator_type}. It carries {_told(carried)}."
        f"{_carriers(accelerator_type, accelerator_count)}"
    )


def implied_accelerator(machine_type: str) -> tuple[str, int] | None:
    """The accelerator type and count that a machine type always has; None where it has a choice, or no GPU.

    a2-highgpu-8g implies 8 x NVIDIA_TESLA_A100; an N1 machine, to which GPUs are attached, implies nothing. The API wants
    both named all the same.
    """
    pairs = [
        (row.accelerator_type, count)
        for row in gpu_machines()
        if row.machine_type == machine_type
        for count in row.accelerator_counts
    ]
    return pairs[0] if len(pairs) == 1 else None


def _told(rows: Sequence[GpuMachine]) -> str:
    return "; ".join(f"{' or '.join(map(str, r.accelerator_counts))} x {r.accelerator_type}" for r in rows)


def _carriers(accelerator_type: str, accelerator_count: int) -> str:
    """A sentence that says where such accelerators are, or which one was meant; empty without an accelerator."""
    if not accelerator_type:
        return ""
    rows = [row for row in gpu_machines() if row.accelerator_type == accelerator_type]
    if not rows:
        return f" No machine carries {accelerator_type!r}; {_meant(accelerator_type)}"
    exact = list(dict.fromkeys(r.machine_type for r in rows if accelerator_count in r.accelerator_counts))
    some = [f"{r.machine_type} ({' or '.join(map(str, r.accelerator_counts))})" for r in rows]
    return f" For {accelerator_type} use {', '.join((exact or some)[:4])}."


def _meant(accelerator_type: str) -> str:
    """Which accelerators share a model's name (A100) with this one, else are written like it, else all."""
    memory = {row.accelerator_type: row.gpu_memory_gb for row in gpu_machines()}
    models = re.findall(r"[A-Z]+\d+", accelerator_type.upper())
    alike = [name for name in memory if any(model in name.split("_") for model in models)]
    alike = alike or difflib.get_close_matches(accelerator_type, memory, n=2)
    told = " or ".join(f"{name} ({memory[name]} GB)" for name in alike)
    return f"did you mean {told}?" if told else f"there are {', '.join(memory)}."
