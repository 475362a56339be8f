"""What a training job has beside its program: machines in their roles, how they are had, reached and kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from penstock_components.jobs.findings import Finding, require
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJob,
    CustomJobSpec,
    DiskSpec,
    EncryptionSpec,
    GcsDestination,
    LustreMount,
    MachineSpec,
    NfsMount,
    PscInterfaceConfig,
    PythonPackageSpec,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.reader import PLACEHOLDER
from penstock_components.jobs.reduction_server import ReductionServer
from penstock_components.jobs.roles import Evaluators, ParameterServers, later_pools
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.topology import Topology, nodes
from penstock_components.jobs.typed import mistyped
from penstock_components.machines.catalogue import MachineError

logger = logging.getLogger(__name__)

SchedulingStrategy = Literal["STANDARD", "SPOT", "FLEX_START"]
LONGEST = timedelta(days=7)
"""Longest running time that the service gives a job, and its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VpcPeering:
    """The job's replicas get addresses of your network: VPC Network Peering with Google's."""

    network: str
    """projects/<project number>/global/networks/<name>; for a Shared VPC the number of the host project."""
    reserved_ip_ranges: tuple[str, ...] = ()
    """Names of ranges that were allocated for the peering; empty: any of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The machines of a job and everything else that is not its program. Checked where a job is made of it."""

    machine: MachineSpec | str
    """Of the primary and the workers; a machine type alone where it takes one kind of accelerator only."""
    num_nodes: int = 1
    disk: DiskSpec | None = None
    """Boot disk of the primary and the workers; it is lost with the machine."""
    reduction_server: ReductionServer | None = None
    parameter_servers: ParameterServers | None = None
    """In the place of a Reduction Server."""
    evaluators: Evaluators | None = None
    strategy: SchedulingStrategy = "STANDARD"
    """One for all machines of a job: the API has no other."""
    timeout: timedelta = LONGEST
    max_wait: timedelta | None = None
    """FLEX_START only: how long to wait for machines; 0 waits for ever. None: the service's default, a day."""
    restart_job_on_worker_restart: bool = True
    """A restarted worker cannot join an NCCL group that is running: the whole job starts again and resumes."""
    disable_retries: bool = False
    network: VpcPeering | PscInterfaceConfig | None = None
    nfs_mounts: tuple[NfsMount, ...] = ()
    lustre_mounts: tuple[LustreMount, ...] = ()
    persistent_resource_id: str = ""
    service_account: str = ""
    tensorboard: str = ""
    experiment: str = ""
    experiment_run: str = ""
    enable_web_access: bool = False
    enable_dashboard_access: bool = False
    kms_key_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(mistyped(self))
        machine = self.machine if isinstance(self.machine, str) else self.machine.machine_type
        if PLACEHOLDER.search(machine):
            require([_of_pipeline(machine)])
        if self.num_nodes < 1:
            require([_no_node(self.num_nodes)])

    @property
    def topology(self) -> Topology:
        """The nodes that train. Raises MachineError for a machine that does not exist, JobSpecError for no node."""
        return nodes(self.machine, self.num_nodes)

    def pools(
        self, program: ContainerSpec | PythonPackageSpec, *, location: str
    ) -> tuple[WorkerPoolSpec, ...]:
        """Pool 0: the primary, 1: the other nodes, 2: reducers or parameter servers, 3: evaluators.

        A pool between others that the job does not have is an empty one, which holds the place.
        """
        try:
            topology = self.topology
        except MachineError:  # the rules say it with the field's name, beside all else that is wrong
            topology = Topology(
                machine=_named(self.machine), num_nodes=self.num_nodes, accelerators_per_node=0
            )
        if isinstance(program, ContainerSpec):
            program = topology.prepared(program)
        training = topology.pools(
            program, disk=self.disk, nfs_mounts=self.nfs_mounts, lustre_mounts=self.lustre_mounts
        )
        reducers = self.reduction_server.pool(location) if self.reduction_server else None
        later = later_pools(
            reducers=reducers, parameter_servers=self.parameter_servers, evaluators=self.evaluators
        )
        place_of_workers = (WorkerPoolSpec(),) if later and len(training) == 1 else ()
        return (*training, *place_of_workers, *later)

    def custom_job(
        self,
        program: ContainerSpec | PythonPackageSpec,
        *,
        display_name: str,
        base_output_directory: str = "",
        context: Context,
    ) -> CustomJob:
        """The job that runs `program` on these machines, in the context's location.

        Raises JobSpecError with everything that Vertex AI would refuse or that would not do what it says; logs what costs
        time or money.
        """
        require(mistyped(program, "program"))
        peering = self.network if isinstance(self.network, VpcPeering) else None
        job = CustomJob(
            display_name=display_name,
            labels=self.labels,
            encryption_spec=EncryptionSpec(kms_key_name=self.kms_key_name) if self.kms_key_name else None,
            job_spec=CustomJobSpec(
                worker_pool_specs=self.pools(program, location=context.location),
                scheduling=Scheduling(
                    strategy=self.strategy,
                    timeout=self.timeout,
                    max_wait_duration=self.max_wait,
                    restart_job_on_worker_restart=self.restart_job_on_worker_restart
                    and not self.disable_retries,
                    disable_retries=self.disable_retries,
                ),
                network=peering.network if peering else "",
                reserved_ip_ranges=peering.reserved_ip_ranges if peering else (),
                psc_interface_config=self.network if isinstance(self.network, PscInterfaceConfig) else None,
                base_output_directory=(
                    GcsDestination(output_uri_prefix=base_output_directory) if base_output_directory else None
                ),
                persistent_resource_id=self.persistent_resource_id,
                service_account=self.service_account,
                tensorboard=self.tensorboard,
                experiment=self.experiment,
                experiment_run=self.experiment_run,
                enable_web_access=self.enable_web_access,
                enable_dashboard_access=self.enable_dashboard_access,
            ),
        )
        from penstock_components.jobs.rules.whole_job import (
            check_custom_job,
        )  # a recipe that is only planned needs no rules

        for warning in require(check_custom_job(job, context)):
            logger.warning("%s", warning.told())
        return job


def _named(machine: MachineSpec | str) -> MachineSpec:
    return machine if isinstance(machine, MachineSpec) else MachineSpec(machine_type=machine)


def _of_pipeline(machine: str) -> Finding:
    return Finding(
        path="machine",
        rule="placeholder",
        reason=f"it is {machine}, which is known only when the pipeline runs and would reach the API as text.",
        fix="Machines are decided when the pipeline is compiled: give a constant, and make one pipeline for each value.",
    )


def _no_node(num_nodes: int) -> Finding:
    return Finding(path="num_nodes", rule="num-nodes", reason=f"it is {num_nodes}.", fix="Give at least 1.")
