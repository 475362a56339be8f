"""Disks, mounts and the job's place in Cloud Storage."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import CustomJobSpec, DiskSpec, LustreMount, NfsMount
from penstock_components.jobs.rules.contents import filled_pools, is_placeholder, num_nodes
from penstock_components.jobs.rules.context import Context

DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
DISK_SIZES_GB = range(100, 64_001)


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Boot disks, NFS and Lustre mounts, base_output_directory."""
    for _, path, pool in filled_pools(spec):
        yield from _disk(f"{path}.disk_spec", pool.disk_spec or DiskSpec())
        for index, nfs in enumerate(pool.nfs_mounts):
            yield from _nfs(f"{path}.nfs_mounts[{index}]", nfs)
        for index, lustre in enumerate(pool.lustre_mounts):
            yield from _lustre(f"{path}.lustre_mounts[{index}]", lustre)
        yield from _mount_points(
            f"{path}.nfs_mounts", "/mnt/nfs", [each.mount_point for each in pool.nfs_mounts]
        )
        yield from _mount_points(
            f"{path}.lustre_mounts", "/mnt/lustre", [each.mount_point for each in pool.lustre_mounts]
        )
    if context.knows("network", "psc_interface_config"):
        yield from _reach(spec)
    yield from _output_directory(spec, context)


def _disk(path: str, disk: DiskSpec) -> Iterator[Finding]:
    if disk.boot_disk_type not in ("", *DISK_TYPES) and not is_placeholder(disk.boot_disk_type):
        yield Finding(
            path=f"{path}.boot_disk_type",
            rule="disk-type",
            reason=f"{quoted(disk.boot_disk_type)} is no boot disk of training; it takes {', '.join(DISK_TYPES)}.",
            fix="Write pd-ssd, or leave it out for the machine's default.",
        )
    size = disk.boot_disk_size_gb
    if size and size not in DISK_SIZES_GB:
        yield Finding(
            path=f"{path}.boot_disk_size_gb",
            rule="disk-size",
            reason=f"{size} GB is no size of a boot disk; it has {DISK_SIZES_GB[0]} to {DISK_SIZES_GB[-1]} GB.",
            fix=f"Write {min(max(size, DISK_SIZES_GB[0]), DISK_SIZES_GB[-1])}.",
        )


def _nfs(path: str, mount: NfsMount) -> Iterator[Finding]:
    yield from _address(f"{path}.server", mount.server)
    if not mount.path.startswith("/") and not is_placeholder(mount.path):
        yield Finding(
            path=f"{path}.path",
            rule="nfs-path",
            reason=f"{quoted(mount.path)} does not begin with /; it is the share's path from the server's root.",
            fix=f"Write /{mount.path}." if mount.path else "Write the path that the server exports.",
        )
    yield from _mount_point(f"{path}.mount_point", "/mnt/nfs", mount.mount_point)


def _lustre(path: str, mount: LustreMount) -> Iterator[Finding]:
    yield from _address(f"{path}.instance_ip", mount.instance_ip)
    for name, value in (("volume_handle", mount.volume_handle), ("filesystem", mount.filesystem)):
        if not value:
            yield Finding(
                path=f"{path}.{name}",
                rule="required",
                reason="it is missing; a Lustre mount needs all of its four fields.",
                fix="Write what `gcloud lustre instances describe` tells of the instance.",
            )
    yield from _mount_point(f"{path}.mount_point", "/mnt/lustre", mount.mount_point)


def _address(path: str, text: str) -> Iterator[Finding]:
    if is_placeholder(text):
        return
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        yield Finding(
            path=path,
            rule="mount-server",
            reason=f"{quoted(text)} is no IP address." if text else "it is missing.",
            fix="Write the server's internal IP address, such as 10.76.0.10.",
        )
        return
    if not address.is_private:
        yield Finding(
            path=path,
            rule="mount-server-public",
            reason=f"{text} is no private address; a share is reached inside your network.",
            fix="Write the server's internal IP address, unless your network uses this one privately.",
            severity="warning",
        )


def _mount_point(path: str, root: str, text: str) -> Iterator[Finding]:
    if is_placeholder(text):
        return
    relative = text.removeprefix(f"{root}/").strip("/")
    if not text.strip("/"):
        yield Finding(
            path=path,
            rule="mount-point",
            reason=f"{quoted(text)} names no folder; the share is seen at {root}/<mount_point>.",
            fix="Write one, such as data.",
        )
    elif text.startswith("/") or ".." in text.split("/"):
        yield Finding(
            path=path,
            rule="mount-point",
            reason=f"{quoted(text)} is not below {root}; the share is seen at {root}/<mount_point>.",
            fix=f"Write {relative.replace('../', '') or 'data'}, and read {root}/{relative.replace('../', '') or 'data'}.",
        )


def _mount_points(path: str, root: str, points: list[str]) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for index, point in enumerate(each.strip("/") for each in points):
        if point and point in seen:
            yield Finding(
                path=f"{path}[{index}].mount_point",
                rule="mount-point-twice",
                reason=f"{root}/{point} is taken by mount {seen[point]} of this pool.",
                fix="Give each mount its own.",
            )
        seen.setdefault(point, index)


def _reach(spec: CustomJobSpec) -> Iterator[Finding]:
    """A share has a private address, which a job reaches only through a network of yours."""
    if spec.network or spec.psc_interface_config is not None:
        return
    for _, path, pool in filled_pools(spec):
        if pool.nfs_mounts or pool.lustre_mounts:
            kind = "nfs_mounts" if pool.nfs_mounts else "lustre_mounts"
            yield Finding(
                path=f"{path}.{kind}",
                rule="mount-network",
                reason="the job has no way into the network where the share is.",
                fix="Set network (VPC peering) or psc_interface_config of the job spec.",
                severity="error" if pool.nfs_mounts else "warning",
            )
            return


def _output_directory(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    path = "base_output_directory.output_uri_prefix"
    if not context.knows("base_output_directory"):
        return
    if spec.base_output_directory is None:
        yield from _no_output_directory(spec, context)
        return
    prefix = spec.base_output_directory.output_uri_prefix
    bucket = prefix.removeprefix("gs://").partition("/")[0]
    if is_placeholder(prefix) or (prefix.startswith("gs://") and bucket):
        return
    meant = (
        f"gs://{prefix.removeprefix('/gcs/').strip('/')}"
        if prefix.startswith("/gcs/")
        else "gs://bucket/path"
    )
    yield Finding(
        path=path,
        rule="output-directory",
        reason=f"{quoted(prefix)} is no place in Cloud Storage; it is written as a URI."
        if prefix
        else "it is missing.",
        fix=f"Write {meant}.",
    )


def _no_output_directory(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Only of jobs that have to resume: on several machines, or on machines that are taken away."""
    is_spot = spec.scheduling is not None and spec.scheduling.strategy == "SPOT"
    is_spot = is_spot and context.knows("scheduling.strategy")
    is_ours = bool(context.strategy) or context.through_gcpc
    if is_spot or (is_ours and num_nodes(spec) > 1):
        why = "Spot machines are taken away" if is_spot else "one machine of several fails sooner or later"
        yield Finding(
            path="base_output_directory",
            rule="output-directory-missing",
            reason=f"there is none: {why}, and AIP_CHECKPOINT_DIR, from which the job would resume, is not set.",
            fix="Set base_output_directory.output_uri_prefix to a gs:// URI that stays the same when the job is sent again.",
            severity="warning",
        )
