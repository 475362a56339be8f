"""Fields that people look for and the API does not have, and what does the job for real.

Each entry is a form found in public guides; the right one is from the API's protos (google.cloud.aiplatform.v1) and
Vertex AI's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_components.jobs.roles import ROLE_NAMES


@dataclass(frozen=True, slots=True)
class Advice:
    """What is said in place of "unknown field"."""

    rule: str
    reason: str
    fix: str
    means: str = ""
    """The field whose place it takes, of which nothing more is told then."""


_SPOT = Advice(
    "spot-per-pool",
    "there is no Spot for one pool: a job has one strategy for all of them.",
    "Remove it and set scheduling.strategy of the job spec to SPOT.",
)
_DISK = Advice(
    "persistent-disk",
    "training has no persistent disks: a replica has its boot disk, which is lost with the machine.",
    "Keep what must last in Cloud Storage (also seen below /gcs), on NFS (nfs_mounts) or Lustre (lustre_mounts); for more "
    "scratch space raise disk_spec.boot_disk_size_gb.",
)
_VOLUME = Advice(
    "volume",
    "training has no volumes and no claims on them.",
    "Every bucket that the job's account can read is seen at /gcs/<bucket>; a pool mounts NFS with nfs_mounts and Lustre with "
    "lustre_mounts.",
)
_SHARED_MEMORY = Advice(
    "shared-memory",
    "a training container has no field for the size of its shared memory.",
    "Start fewer workers of the data loader, or let them share through files "
    "(torch.multiprocessing.set_sharing_strategy('file_system')).",
)
_ACCELERATOR = Advice(
    "accelerator-fields",
    "accelerators are told by two fields of machine_spec.",
    "Write machine_spec.accelerator_type, such as NVIDIA_L4, and machine_spec.accelerator_count.",
    means="machine_spec",
)
_MACHINE = Advice(
    "machine-resources",
    "a replica has a whole machine; its CPUs and memory are those of the machine type.",
    "Choose them with machine_spec.machine_type.",
)
_IMAGE = Advice(
    "image-field",
    "an image stands in container_spec, as image_uri.",
    "Write container_spec: {image_uri: ...}.",
    means="container_spec",
)
_PULL = Advice(
    "image-pull",
    "how an image is pulled is not chosen.",
    "Remove it; name the image by its digest (name@sha256:...) to be sure which one runs, and let the job's project read it.",
)
_ENTRY_POINT = Advice(
    "entry-point", "a container's start is its command and args.", "Write container_spec.command, as a list."
)
_WORKING_DIRECTORY = Advice(
    "working-directory",
    "a container starts in the image's own WORKDIR.",
    "Set WORKDIR in the Dockerfile, or the command to [bash, -c, cd <folder> && exec ...].",
)
_SECRET = Advice(
    "secret-reference",
    "a training container takes no reference to a secret; SecretEnvVar is for other resources.",
    "Give the secret's name as the variable's value (projects/<project>/secrets/<secret>/versions/latest) and read it from "
    "Secret Manager when the program starts, as the job's service account.",
)
_RESTART = Advice(
    "restart-policy",
    "there is no policy of restarts: Vertex AI restarts a replica's container up to 5 times.",
    "Set scheduling.restart_job_on_worker_restart to true where all replicas have to start again together, or "
    "scheduling.disable_retries.",
)
_RETRIES = Advice(
    "retry-count",
    "how often a job is tried again is not chosen: up to 3 times, on Spot up to 6, of itself.",
    "Set scheduling.disable_retries for none after internal errors; restarts of processes are the launcher's (torchrun "
    "--max-restarts), further tries the pipeline's (.set_retry on the task).",
)
_PRIORITY = Advice(
    "priority", "a job has no priority and no queue.", "FLEX_START with max_wait_duration waits for machines."
)
_PLACEMENT = Advice(
    "placement",
    "Vertex AI places the machines itself; a job has a region only.",
    "Remove it; a reservation (machine_spec.reservation_affinity) decides the zone.",
)
_LOCATION = Advice(
    "location",
    "the region is where the job is created, no field of it.",
    "Give it to the client: --region of gcloud, location of the SDK and of CustomTrainingJobOp.",
)
_PROJECT = Advice(
    "project",
    "the project is where the job is created, no field of it.",
    "Give it to the client: --project of gcloud, project of the SDK and of CustomTrainingJobOp.",
)
_RESERVATION = Advice(
    "reservation",
    "a reservation is named by each pool's machine.",
    "Write machine_spec.reservation_affinity: {reservation_affinity_type: SPECIFIC_RESERVATION, key: "
    "compute.googleapis.com/reservation-name, values: [projects/P/zones/Z/reservations/R]}.",
)
_TIMEOUT = Advice(
    "timeout-field",
    "the longest running time is scheduling.timeout of the job spec.",
    'Write scheduling: {timeout: "86400s"}.',
)
_MAX_WAIT = Advice(
    "max-wait-field",
    "the time to wait for machines is scheduling.max_wait_duration of the job spec, with FLEX_START.",
    'Write scheduling: {strategy: FLEX_START, max_wait_duration: "86400s"}.',
)
_SCALING = Advice(
    "autoscaling",
    "a pool has a fixed number of replicas.",
    "Write replica_count; a larger job is another job that resumes from the checkpoint.",
)
_SUBNET = Advice(
    "subnetwork",
    "a job joins no subnetwork of yours.",
    "Set network of the job spec (VPC peering), or psc_interface_config with a network attachment in the subnetwork.",
)
_ROLE = Advice(
    "pool-role",
    f"a pool's role is its place: {', '.join(f'{index} {name}' for index, name in enumerate(ROLE_NAMES))}.",
    "Remove it and put the pools into this order.",
)
_REDUCERS = Advice(
    "reduction-server-argument",
    "it is an argument of the SDK's, which makes a pool of it.",
    "Write the Reduction Server as the pool at index 2, with Google's reductionserver image as container_spec.image_uri.",
)
_SCRIPT = Advice(
    "local-script",
    "a job runs an image or packages that are in Cloud Storage, no file of yours.",
    "Build the code and its requirements into an image, or package them and give python_package_spec.package_uris.",
)
_NAMES: Mapping[Advice, str] = {
    _SPOT: "spot use_spot is_spot spot_vm spot_instances preemptible use_preemptible is_preemptible",
    _DISK: "persistent_disk_size_gb persistent_disk_type persistent_disk_spec persistent_disk persistent_disks data_disk "
    "data_disks additional_disks",
    _VOLUME: "volumes volume_mounts volume pvc pvcs persistent_volume_claim persistent_volume_claims gcs_fuse gcs_mounts "
    "gcsfuse",
    _SHARED_MEMORY: "shm_size shm_size_gb shared_memory shared_memory_size shared_memory_size_mb",
    _ACCELERATOR: "gpus gpu gpu_count gpu_type num_gpus gpus_per_node accelerators",
    _MACHINE: "cpu cpus memory memory_gb cpu_limit memory_limit resources resource_requests limits requests",
    _IMAGE: "container_uri container_image image docker_image container",
    _PULL: "image_pull_policy image_pull_secrets",
    _ENTRY_POINT: "entrypoint entry_point",
    _WORKING_DIRECTORY: "working_dir working_directory workdir",
    _SECRET: "value_from secret_key_ref secret_ref secret_env secret_env_vars secret_environment_variables env_from secrets",
    _RESTART: "restart_policy restart restart_on_failure",
    _RETRIES: "retry retries max_retries retry_count max_retry_count max_restarts backoff_limit retry_policy",
    _PRIORITY: "priority priority_class priority_class_name queue",
    _PLACEMENT: "node_selector node_selectors tolerations affinity placement placement_policy zone zones topology_key",
    _LOCATION: "region location",
    _PROJECT: "project project_id",
    _RESERVATION: "reservation reservations reservation_name",
    _TIMEOUT: "max_run_duration max_run_time max_running_time timeout_seconds timeout_s max_runtime",
    _MAX_WAIT: "max_wait max_wait_time max_wait_seconds",
    _SCALING: "autoscaling autoscaling_spec min_replica_count max_replica_count min_replicas max_replicas",
    _SUBNET: "subnet subnetwork subnetworks",
    _ROLE: "role pool_role pool_type",
    _REDUCERS: "reduction_server_replica_count reduction_server_machine_type reduction_server_container_uri",
    _SCRIPT: "script script_path requirements",
}
_BY_NAME = {name: advice for advice, names in _NAMES.items() for name in names.split()}


def advice_on(name: str) -> Advice | None:
    """What to say of a field `name`, in snake_case, that does not exist; None when nothing is known of it."""
    return _BY_NAME.get(name)
