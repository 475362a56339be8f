"""Job specs that Vertex AI takes, and what rules say of one that was broken in one place."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJobSpec,
    DiskSpec,
    DnsPeeringConfig,
    EnvVar,
    GcsDestination,
    LustreMount,
    MachineSpec,
    NfsMount,
    PscInterfaceConfig,
    PythonPackageSpec,
    ReservationAffinity,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.whole_job import check_job_spec

IMAGE = "europe-docker.pkg.dev/project/trainers/trainer:1"
REDUCERS = "europe-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
NETWORK = "projects/123456/global/networks/training"
RESERVATION = ReservationAffinity(
    reservation_affinity_type="SPECIFIC_RESERVATION",
    key="compute.googleapis.com/reservation-name",
    values=("projects/p/zones/us-central1-a/reservations/r",),
)
PSC = PscInterfaceConfig(
    network_attachment="projects/p/regions/europe-west4/networkAttachments/training",
    dns_peering_configs=(
        DnsPeeringConfig(
            domain="corp.example.internal.", target_project="network-host", target_network="training"
        ),
    ),
)
L4 = MachineSpec(machine_type="g2-standard-24", accelerator_type="NVIDIA_L4", accelerator_count=2)
A100 = MachineSpec(machine_type="a2-highgpu-8g", accelerator_type="NVIDIA_TESLA_A100", accelerator_count=8)
H100 = MachineSpec(machine_type="a3-highgpu-8g", accelerator_type="NVIDIA_H100_80GB", accelerator_count=8)
CPU = MachineSpec(machine_type="n1-standard-8")
TPU = MachineSpec(machine_type="ct5lp-hightpu-4t", tpu_topology="4x4")
RESTARTS = Scheduling(restart_job_on_worker_restart=True, timeout=timedelta(days=2))
OUTPUT = GcsDestination(output_uri_prefix="gs://bucket/runs/a")


def container(**fields: Any) -> ContainerSpec:
    return ContainerSpec(image_uri=IMAGE, **fields)


def pool(machine: MachineSpec | None = CPU, replicas: int = 1, **fields: Any) -> WorkerPoolSpec:
    if "python_package_spec" not in fields:
        fields.setdefault("container_spec", container())
    return WorkerPoolSpec(machine_spec=machine, replica_count=replicas, **fields)


def job(*pools: WorkerPoolSpec, **fields: Any) -> CustomJobSpec:
    return CustomJobSpec(worker_pool_specs=pools or (pool(),), **fields)


def nodes(machine: MachineSpec, count: int, **fields: Any) -> CustomJobSpec:
    fields.setdefault("scheduling", RESTARTS)
    return job(pool(machine), pool(machine, count - 1), base_output_directory=OUTPUT, **fields)


def with_env(**variables: str) -> CustomJobSpec:
    return job(
        pool(container_spec=container(env=tuple(EnvVar(name=k, value=v) for k, v in variables.items())))
    )


def with_command(*command: str, args: tuple[str, ...] = ()) -> CustomJobSpec:
    return job(pool(container_spec=container(command=command, args=args)))


AT = "worker_pool_specs[0].machine_spec"
GB200 = MachineSpec(
    machine_type="a4x-highgpu-4g",
    accelerator_type="NVIDIA_GB200",
    accelerator_count=4,
    reservation_affinity=RESERVATION,
)


def gpu(machine_type: str, accelerator: str = "", count: int = 0, **fields: Any) -> MachineSpec:
    return MachineSpec(
        machine_type=machine_type, accelerator_type=accelerator, accelerator_count=count, **fields
    )


PACKAGE = PythonPackageSpec(
    executor_image_uri="europe-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest",
    package_uris=("gs://bucket/packages/trainer-0.1.tar.gz",),
    python_module="trainer.task",
    args=("--epochs=3",),
)
REDUCED = job(
    pool(A100),
    pool(A100, 7),
    pool(MachineSpec(machine_type="n1-highcpu-16"), 25, container_spec=ContainerSpec(image_uri=REDUCERS)),
    scheduling=RESTARTS,
    base_output_directory=OUTPUT,
)
GOOD: dict[str, tuple[CustomJobSpec, Context]] = {
    "one CPU machine": (job(), Context()),
    "one machine with 2 x L4 and a larger disk": (
        job(pool(L4, disk_spec=DiskSpec(boot_disk_type="pd-ssd", boot_disk_size_gb=500))),
        Context(location="europe-west4"),
    ),
    "8 nodes of A100 with 25 reducers under DDP": (REDUCED, Context(location="europe-west4", strategy="ddp")),
    "FLEX_START on H100": (
        nodes(
            H100,
            4,
            scheduling=Scheduling(
                strategy="FLEX_START",
                max_wait_duration=timedelta(hours=12),
                timeout=timedelta(days=7),
                restart_job_on_worker_restart=True,
            ),
        ),
        Context(),
    ),
    "SPOT": (
        nodes(L4, 2, scheduling=replace(RESTARTS, strategy="SPOT")),
        Context(through_gcpc=True, strategy="fsdp-full"),
    ),
    "GB200 of a reservation": (
        nodes(
            GB200,
            2,
        ),
        Context(location="us-central1"),
    ),
    "TPU v5e": (job(pool(TPU)), Context()),
    "TPU v3": (
        job(pool(MachineSpec(machine_type="cloud-tpu", accelerator_type="TPU_V3", accelerator_count=32))),
        Context(),
    ),
    "NFS over a PSC interface": (
        job(
            pool(nfs_mounts=(NfsMount(server="10.0.0.2", path="/share", mount_point="data"),)),
            psc_interface_config=PSC,
        ),
        Context(location="europe-west4"),
    ),
    "Lustre over VPC peering": (
        job(
            pool(
                lustre_mounts=(
                    LustreMount(
                        instance_ip="10.0.0.3", volume_handle="v", filesystem="lustrefs", mount_point="data"
                    ),
                )
            ),
            network=NETWORK,
            reserved_ip_ranges=("vertex-ai-ip-range",),
        ),
        Context(),
    ),
    "a Python package": (job(pool(python_package_spec=PACKAGE)), Context()),
    "a persistent resource": (
        job(pool(L4), persistent_resource_id="shared-l4"),
        Context(),
    ),
    "a share of a GPU": (
        job(
            pool(
                MachineSpec(
                    machine_type="a2-ultragpu-1g",
                    accelerator_type="NVIDIA_A100_80GB",
                    accelerator_count=1,
                    gpu_partition_size="1g.10gb",
                )
            )
        ),
        Context(),
    ),
    "parameter servers and an evaluator": (
        job(pool(), pool(replicas=3), pool(replicas=2), pool()),
        Context(),
    ),
    "a TensorBoard, a key and arguments that a pipeline puts in": (
        job(
            pool(
                container_spec=container(
                    args=(
                        "--lr={{$.inputs.parameters['lr']}}",
                        "{{$.inputs.parameters['data']}}",
                        "--eos-token=2",
                    ),
                    env=(
                        EnvVar(name="HF_TOKEN", value="{{$.inputs.parameters['secret']}}"),
                        EnvVar(
                            name="WANDB_API_KEY", value="projects/1/secrets/wandb-api-key/versions/latest"
                        ),
                        EnvVar(name="MAX_TOKENS", value="4096"),
                    ),
                )
            ),
            service_account="trainer@project.iam.gserviceaccount.com",
            tensorboard="projects/1/locations/europe-west4/tensorboards/2",
        ),
        Context(through_gcpc=True),
    ),
}


def findings(spec: CustomJobSpec, **context: Any) -> list[Finding]:
    return check_job_spec(spec, Context(**context))


def only(spec: CustomJobSpec, **context: Any) -> Finding:
    """The one finding there is: a fault is told once, and nothing follows from it."""
    found = findings(spec, **context)
    assert len(found) == 1, [each.told() for each in found]
    assert found[0].reason.endswith((".", "?"))
    assert found[0].fix.endswith((".", "?"))
    return found[0]


def refused(spec: CustomJobSpec, path: str, rule: str, *words: str, **context: Any) -> None:
    """Asserts that the one finding is this error, and that its text holds the words."""
    finding = only(spec, **context)
    assert (finding.path, finding.rule, finding.severity) == (path, rule, "error")
    text = finding.told()
    assert [word for word in words if word not in text] == [], text


def warned(spec: CustomJobSpec, path: str, rule: str, *words: str, **context: Any) -> None:
    """The same for a warning."""
    finding = only(spec, **context)
    assert (finding.path, finding.rule, finding.severity) == (path, rule, "warning")
    text = finding.told()
    assert [word for word in words if word not in text] == [], text
