"""Fields that people look for and the API does not have, and what does the job for real.

Each entry is a form found in public guides; the right one is from the API's protos (google.cloud.aiplatform.v1) and
Vertex AI's documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """What is said in place of "unknown field"."""

    rule: str
    reason: str
    fix: str


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
_BY_NAME = {
    "spot": _SPOT, "use_spot": _SPOT, "is_spot": _SPOT, "preemptible": _SPOT, "use_preemptible": _SPOT,
    "persistent_disk_size_gb": _DISK, "persistent_disk_type": _DISK, "persistent_disk_spec": _DISK,
    "persistent_disk": _DISK,
}  # fmt: skip


def advice_on(name: str) -> Advice | None:
    """What to say of a field `name`, in snake_case, that does not exist; None when nothing is known of it."""
    return _BY_NAME.get(name)
