"""Names of machine types, and which one was probably meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection

from penstock_components.machines.tables import tables


@functools.cache
def gpu_names() -> frozenset[str]:
    """Machine types that carry GPUs, N1 among them, which need not."""
    return frozenset(row["machine_type"] for row in tables()["gpu_machines"])


@functools.cache
def tpu_names() -> frozenset[str]:
    """Machine types that are TPUs."""
    rows = (*tables()["tpu_machines"], *tables()["legacy_tpus"])
    return frozenset(row["machine_type"] for row in rows)


@functools.cache
def cpu_names() -> frozenset[str]:
    """Machine types that run without an accelerator."""
    return frozenset(
        f"{series}-{size}" for series, sizes in tables()["cpu_machines"].items() for size in sizes
    )


def nearest(machine_type: str, n: int = 3) -> list[str]:
    """At most `n` machine types of the catalogue that are written nearly like this one or begin with it."""
    return _nearest(machine_type, gpu_names() | tpu_names() | cpu_names(), n)


def unknown_machine(machine_type: str, *, kind: str) -> str:
    """The sentence about a machine type that is not of the kind (GPU, TPU, CPU) it was taken for."""
    names = {"GPU": gpu_names(), "TPU": tpu_names(), "CPU": cpu_names()}[kind]
    elsewhere = " Compute Engine has it." if machine_type in tables()["only_on_compute_engine"] else ""
    close = _nearest(machine_type, names, 3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"{machine_type!r} is not a {kind} machine type of Vertex AI training "
        f"(catalogue of {tables()['date']}).{elsewhere}{hint}"
    )


def _nearest(machine_type: str, known: Collection[str], n: int) -> list[str]:
    written = machine_type.lower().replace("_", "-")
    longer = [name for name in sorted(known) if name.startswith(f"{written}-")]
    alike = difflib.get_close_matches(written, sorted(known), n=n)
    return list(dict.fromkeys([*longer, *alike]))[:n]
