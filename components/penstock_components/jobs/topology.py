"""The nodes that train: their pools, how many processes they are, how fast they talk, and what NCCL needs for that.

nodes("a2-highgpu-8g", 4).pools(container)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock_components.jobs.findings import JobSpecError
from penstock_components.jobs.messages import (
    ContainerSpec,
    DiskSpec,
    EnvVar,
    LustreMount,
    MachineSpec,
    NfsMount,
    PythonPackageSpec,
    WorkerPoolSpec,
)
from penstock_components.jobs.nccl import nccl_setup, settings_that_do_not_apply
from penstock_components.machines.catalogue import (
    MachineError,
    cpu_machine,
    gpu_machine,
    gpu_machines,
    implied_accelerator,
    is_cpu_machine,
    kind_of,
    legacy_tpu,
    nearest,
    tpu_machine,
)

__all__ = ["Topology", "network_gbps", "nodes", "settings_that_do_not_apply"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Equal nodes of which the first is the primary. Made by `nodes`, which has looked the machine up."""

    machine: MachineSpec
    num_nodes: int
    accelerators_per_node: int
    """GPUs of a machine; chips of a whole TPU slice (cores of v2 and v3), which is one node to the API; else 0."""

    @property
    def world_size(self) -> int:
        """Processes with one for each accelerator, or one for each node where there is none."""
        return self.num_nodes * max(1, self.accelerators_per_node)

    @property
    def network_gbps(self) -> float | None:
        """Egress ceiling of one node in Gbit/s; None where no first-hand source gives it."""
        return network_gbps(self.machine)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that NCCL needs on these machines beside its script's: see `nccl_setup`."""
        return nccl_setup(self.machine.machine_type).environment

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """The command that starts `words` with the network set up; `words` itself where nothing is to be set up.

        A family whose set-up is a script gets a shell that sources it and then becomes the program, which so receives
        signals itself. The words are handed on as they are, whatever they contain. One node needs no network. Raises
        JobSpecError for no words where there is a script: an image's own entry point cannot be wrapped from outside.
        """
        script = nccl_setup(self.machine.machine_type).script
        if not script or self.num_nodes == 1:
            return tuple(words)
        if not words:
            raise JobSpecError(
                f"{self.machine.machine_type} needs {script} sourced before the program, and the container has no command "
                "to put it before. Give the image's entry point as command."
            )
        return ("bash", "-c", f'source {script} && exec "$0" "$@"', *words)

    def prepared(self, container: ContainerSpec) -> ContainerSpec:
        """The same container with `command` and `environment` of these machines; what it sets itself stays.

        Raises JobSpecError as `command` does.
        """
        own = {variable.name for variable in container.env}
        added = (
            EnvVar(name=name, value=value) for name, value in self.environment.items() if name not in own
        )
        return replace(container, command=self.command(container.command), env=(*container.env, *added))

    def pools(
        self,
        program: ContainerSpec | PythonPackageSpec,
        *,
        disk: DiskSpec | None = None,
        nfs_mounts: tuple[NfsMount, ...] = (),
        lustre_mounts: tuple[LustreMount, ...] = (),
    ) -> tuple[WorkerPoolSpec, ...]:
        """Pool 0 with the primary, pool 1 with the other nodes; only pool 0 at one node. The program is left as it is."""
        counts = (1, self.num_nodes - 1) if self.num_nodes > 1 else (1,)
        return tuple(
            WorkerPoolSpec(
                machine_spec=self.machine,
                replica_count=count,
                disk_spec=disk,
                nfs_mounts=nfs_mounts,
                lustre_mounts=lustre_mounts,
                container_spec=program if isinstance(program, ContainerSpec) else None,
                python_package_spec=program if isinstance(program, PythonPackageSpec) else None,
            )
            for count in counts
        )


def nodes(machine: MachineSpec | str, count: int) -> Topology:
    """`count` nodes of a machine, or of a machine type whose accelerators go without saying.

    Raises MachineError for a machine that does not exist, that lacks its accelerators, or a TPU that is asked for more
    than once; JobSpecError for less than one node.
    """
    if count < 1:
        raise JobSpecError(f"num_nodes {count} must be at least 1.")
    spec = _with_accelerators(machine) if isinstance(machine, str) else machine
    return Topology(machine=spec, num_nodes=count, accelerators_per_node=_accelerators(spec, count))


def network_gbps(machine: MachineSpec) -> float | None:
    """Egress ceiling of one machine in Gbit/s; None where the catalogue does not know the machine or its network.

    N1 with GPUs has the figure of the same N1 without, unless its own is known: a GPU takes none of it away (derived).
    """
    known = [
        row.network_gbps
        for row in gpu_machines()
        if (row.machine_type, row.accelerator_type) == (machine.machine_type, machine.accelerator_type)
        and machine.accelerator_count in row.accelerator_counts
    ]
    if known and known[0] is not None:
        return known[0]
    return cpu_machine(machine.machine_type).network_gbps if is_cpu_machine(machine.machine_type) else None


def _with_accelerators(machine_type: str) -> MachineSpec:
    implied = implied_accelerator(machine_type)
    if implied is None:
        return MachineSpec(machine_type=machine_type)
    return MachineSpec(machine_type=machine_type, accelerator_type=implied[0], accelerator_count=implied[1])


def _accelerators(spec: MachineSpec, num_nodes: int) -> int:
    """How many a node has. Raises MachineError."""
    kind = kind_of(spec.machine_type, spec.accelerator_type)
    if kind == "tpu":
        return _chips(spec, num_nodes)
    if kind == "gpu" and spec.gpu_partition_size:
        return spec.accelerator_count
    if kind == "gpu":
        _require_named(spec)
        gpu_machine(spec.machine_type, spec.accelerator_type, spec.accelerator_count)
        return spec.accelerator_count
    if kind is None:
        meant = nearest(spec.machine_type)
        hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
        raise MachineError(f"{spec.machine_type!r} is not a machine type of Vertex AI training.{hint}")
    if spec.accelerator_type or spec.accelerator_count:
        raise MachineError(
            f"{spec.machine_type} carries no accelerators, but {spec.accelerator_count} x "
            f"{spec.accelerator_type or '(no type)'} are given. Leave both out, or use a machine type with GPUs."
        )
    return 0


def _chips(spec: MachineSpec, num_nodes: int) -> int:
    if num_nodes > 1:
        raise MachineError(
            f"{spec.machine_type} is asked for {num_nodes} times, but a TPU job has one pool with one replica. Ask for a "
            "larger slice by its tpu_topology."
        )
    if spec.accelerator_type:
        legacy_tpu(spec.accelerator_type, spec.accelerator_count)
        return spec.accelerator_count
    return tpu_machine(spec.machine_type, spec.tpu_topology).chips


def _require_named(spec: MachineSpec) -> None:
    """Raises MachineError for a machine whose accelerators are left out; the API wants them named."""
    implied = implied_accelerator(spec.machine_type)
    if spec.accelerator_type or implied is None:
        return
    raise MachineError(
        f"{spec.machine_type} is given without its accelerators. Set accelerator_type {implied[0]} and accelerator_count "
        f"{implied[1]}."
    )
