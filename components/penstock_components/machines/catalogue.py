"""What Vertex AI trains on: look machines up by name. Unknown names get the nearest known one.

The data are in machines.json beside this file, with their sources and their date; `refresh` renews what Compute Engine
knows of them. Nothing here downloads.
"""

from __future__ import annotations

from typing import Literal

from penstock_components.machines.cpu import CpuMachine, cpu_machine, is_cpu_machine
from penstock_components.machines.gpu import GpuMachine, gpu_machine, gpu_machines, implied_accelerator
from penstock_components.machines.names import cpu_names, gpu_names, nearest, tpu_names
from penstock_components.machines.tables import MachineError, tables
from penstock_components.machines.tpu import (
    LegacyTpu,
    TpuMachine,
    legacy_tpu,
    legacy_tpus,
    tpu_machine,
    tpu_machines,
)

__all__ = [
    "FLEX_START_ACCELERATORS",
    "CpuMachine",
    "GpuMachine",
    "LegacyTpu",
    "MachineError",
    "TpuMachine",
    "catalogue_date",
    "compute_engine_regions",
    "cpu_machine",
    "gpu_machine",
    "gpu_machines",
    "implied_accelerator",
    "is_cpu_machine",
    "kind_of",
    "legacy_tpu",
    "legacy_tpus",
    "nearest",
    "peak_tflops",
    "reducer_network_gbps",
    "regions_of",
    "tpu_machine",
    "tpu_machines",
]

FLEX_START_ACCELERATORS: frozenset[str] = frozenset(
    {
        "NVIDIA_L4",
        "NVIDIA_TESLA_A100",
        "NVIDIA_A100_80GB",
        "NVIDIA_H100_80GB",
        "NVIDIA_H100_MEGA_80GB",
        "NVIDIA_H200_141GB",
        "NVIDIA_B200",
    }
)
"""What FLEX_START gives; "L4, A100, H100, H200, B200" in Vertex AI's documentation, schedule-jobs-dws, in the API's names.

That page does not tell H100 from H100 Mega; both are taken here.
"""


def kind_of(machine_type: str, accelerator_type: str = "") -> Literal["gpu", "tpu", "cpu"] | None:
    """What a machine type is; None for a name that the catalogue does not have.

    N1 is a CPU machine to which GPUs can be attached: it is "cpu" by its name alone, and "gpu" when asked about together
    with an accelerator type. Every other GPU machine type always has its GPUs and is "gpu" either way.
    """
    if machine_type in tpu_names():
        return "tpu"
    if machine_type in gpu_names() and (accelerator_type or machine_type not in cpu_names()):
        return "gpu"
    return "cpu" if machine_type in cpu_names() else None


def regions_of(name: str) -> tuple[str, ...] | None:
    """Regions in which Vertex AI's quota page has a row for an accelerator type; None where it was not read.

    TPU 7x has no accelerator type and goes by its machine type. That a region has a quota says neither that yours is above
    0 nor that machines are free.
    """
    regions = tables()["quota_regions"].get(name)
    return None if regions is None else tuple(regions)


def compute_engine_regions(machine_type: str) -> tuple[str, ...] | None:
    """Regions in which Compute Engine has a machine type; None until `refresh` has asked it.

    Another fact than `regions_of`: Vertex AI training need not take a type wherever Compute Engine has it.
    """
    regions = tables()["compute_engine_regions"].get(machine_type)
    return None if regions is None else tuple(regions)


def catalogue_date() -> str:
    """Day (ISO 8601) of the data."""
    return str(tables()["date"])


def reducer_network_gbps(machine_type: str) -> float:
    """Egress of a machine for reducers, in Gbit/s.

    Raises MachineError for a machine that is none without accelerators, or whose egress is not known; it names those that
    Google recommends.
    """
    network = cpu_machine(machine_type).network_gbps if is_cpu_machine(machine_type) else None
    if network is None:
        raise MachineError(
            f"the egress of {machine_type!r} as a reducer is not known. Use {' or '.join(tables()['reducer_machines'])}, "
            "which Google recommends."
        )
    return network


def peak_tflops(accelerator_type: str, precision: str) -> float:
    """Dense peak of one accelerator in a compute type (bf16, fp16), in TFLOP/s; 0 where the catalogue has none."""
    by_precision: dict[str, float] = tables()["peak_tflops"].get(accelerator_type, {})
    return float(by_precision.get(precision, 0.0))
