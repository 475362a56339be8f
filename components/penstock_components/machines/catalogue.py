"""Look machines up: valid accelerators, memory, network. Unknown names get the nearest known one."""

from __future__ import annotations

import difflib
import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


class MachineError(ValueError):
    """A machine that does not exist, or accelerators that it does not carry."""


@dataclass(frozen=True, slots=True)
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

    @property
    def has_gpudirect(self) -> bool:
        """Whether GPUs talk past the host; such machines bring their own NCCL network plugin."""
        return "GPUDirect" in self.gpu_fabric


def gpu_machine(machine_type: str, accelerator_type: str, accelerator_count: int) -> GpuMachine:
    """The catalogue's row. Raises MachineError, which says what the machine carries or which one was meant."""
    rows = [row for row in _gpu_machines() if row.machine_type == machine_type]
    if not rows:
        raise MachineError(_unknown(machine_type, {row.machine_type for row in _gpu_machines()}))
    row = next((row for row in rows if row.accelerator_type == accelerator_type), None)
    if row is None or accelerator_count not in row.accelerator_counts:
        carried = "; ".join(
            f"{' or '.join(map(str, r.accelerator_counts))} x {r.accelerator_type}" for r in rows
        )
        fitting = sorted({r.machine_type for r in _gpu_machines() if r.accelerator_type == accelerator_type})
        advice = f" For {accelerator_type} use {', '.join(fitting[:4])}." if row is None and fitting else ""
        raise MachineError(
            f"{machine_type} does not carry {accelerator_count} x {accelerator_type}. It carries {carried}.{advice}"
        )
    return row


def reducer_network_gbps(machine_type: str) -> float:
    """Egress of a machine type that is recommended for reducers, in Gbit/s. Raises MachineError."""
    known = {row["machine_type"]: float(row["network_gbps"]) for row in _data()["reducer_machines"]}
    if machine_type not in known:
        raise MachineError(
            f"{machine_type!r} is not a machine type recommended for reducers; it must be one of {', '.join(sorted(known))}."
        )
    return known[machine_type]


def peak_tflops(accelerator_type: str, precision: str) -> float:
    """Dense peak of one accelerator in a compute type (bf16, fp16), in TFLOP/s; 0 where the catalogue has none."""
    by_precision: dict[str, float] = _data()["peak_tflops"].get(accelerator_type, {})
    return float(by_precision.get(precision, 0.0))


def _unknown(machine_type: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(machine_type, known, n=3)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    return f"{machine_type!r} is not a GPU machine type of Vertex AI training (catalogue of {_data()['date']}).{hint}"


@functools.cache
def _gpu_machines() -> tuple[GpuMachine, ...]:
    return tuple(
        GpuMachine(**{**row, "accelerator_counts": tuple(row["accelerator_counts"])})
        for row in _data()["gpu_machines"]
    )


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("machines.json").read_text()
    told: dict[str, Any] = json.loads(text)
    return told
