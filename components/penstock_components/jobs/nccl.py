"""What NCCL needs between machines of a family, and the settings of it that do nothing there or do harm.

Only what Google documents for Vertex AI training stands here; for most families that is nothing at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock_components.jobs.findings import Finding, Severity
from penstock_components.jobs.messages import EnvVar
from penstock_components.machines.catalogue import gpu_machines, kind_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclSetup:
    """What a program needs before NCCL finds the network of its machine."""

    script: str = ""
    """Sourced by the shell that then becomes the program; empty where there is none."""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables that the program needs beside the script's."""


_GIB = NcclSetup(script="/usr/local/gib/scripts/set_nccl_env.sh")
"""Vertex AI documentation, training/configure-compute: gIB is in the machines' images; prefix the command with this."""
_TCPXO = "a3-megagpu-8g"
_SETUPS = MappingProxyType({"a3-ultragpu-8g": _GIB, "a4-highgpu-8g": _GIB, "a4x-highgpu-4g": _GIB})
_NONE = NcclSetup()


def nccl_setup(machine_type: str) -> NcclSetup:
    """What NCCL needs on a machine type on Vertex AI; nothing for most.

    a3-megagpu-8g has GPUDirect-TCPXO, which Vertex AI documents as set up beforehand; Google's own sample for it
    (vertex-ai-samples, vertex-distributed-training/a3mega) starts torchrun without any NCCL variable. What GKE and Slurm
    want for TCPXO (NCCL_FASTRAK_*, nccl-env-profile.sh) belongs to their own installers and is not given here. A2,
    A3 High, G2, G4 and N1 need nothing that is documented.
    """
    return _SETUPS.get(machine_type, _NONE)


def mentions_setup(text: str) -> bool:
    """Whether a word of a program's start has to do with a set-up script of `nccl_setup`."""
    return any(mark in text for mark in ("set_nccl_env.sh", "/usr/local/gib"))


@dataclass(frozen=True, slots=True)
class _Said:
    """What is wrong with a variable."""

    rule: str
    reason: str
    fix: str
    severity: Severity = "error"


_RDMA = re.compile(r"NCCL_(IB_\w+|PLUGIN_P2P|NET_GDR_\w+)")
_NETWORK = re.compile(r"NCCL_(IB_\w+|PLUGIN_P2P|NET_GDR_\w+|NET|NET_PLUGIN|CROSS_NIC|TUNER_\w+|FASTRAK_\w+)")
_OF_THE_SERVICE = re.compile(r"AIP_\w+|CLOUD_ML_\w+|CLUSTER_SPEC|TF_CONFIG")
_OF_ONE_PROCESS = frozenset({"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR"})
_OF_THE_LAUNCHER = frozenset({"WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"})
_BY_FIELD = MappingProxyType(
    {
        "AIP_MODEL_DIR": "base_output_directory",
        "AIP_CHECKPOINT_DIR": "base_output_directory",
        "AIP_TENSORBOARD_LOG_DIR": "base_output_directory",
        "AIP_TENSORBOARD_RESOURCE_NAME": "tensorboard",
    }
)
"""The field of the job spec from which the service makes the variable."""


def settings_that_do_not_apply(
    machine_type: str, env: Sequence[EnvVar], *, path: str, is_distributed: bool = True
) -> Iterator[Finding]:
    """Variables of a container that do nothing on this machine, or that somebody else sets; `path` is the list's.

    A machine type that the catalogue does not have is judged by the variables that no machine wants. With one replica
    (`is_distributed` false) ranks and TF_CONFIG may be set by hand, as some programs for one machine want them.
    """
    for index, variable in enumerate(env):
        said = _of_roles(variable, is_distributed) or _of_network(machine_type, variable)
        if said is not None:
            yield Finding(
                path=f"{path}[{index}]",
                rule=said.rule,
                reason=said.reason,
                fix=said.fix,
                severity=said.severity,
            )


def _of_roles(variable: EnvVar, is_distributed: bool) -> _Said | None:
    name = variable.name
    if name == "TF_CONFIG" and not is_distributed:
        return None  # the service sets it where there are several replicas only
    if _OF_THE_SERVICE.fullmatch(name):
        field_name = _BY_FIELD.get(name)
        instead = f"Remove it and set {field_name} of the job spec." if field_name else "Remove it."
        return _Said("env-of-the-service", f"{name} is set by Vertex AI in each replica.", instead)
    if not is_distributed:
        return None
    if name in _OF_ONE_PROCESS:
        told = (
            "the address of the primary is known only when the job runs"
            if name == "MASTER_ADDR"
            else "every replica of the pool would have the same"
        )
        return _Said(
            "env-of-the-launcher",
            f"{name}={variable.value} is set by hand: {told}.",
            "Remove it; the launcher derives it from CLUSTER_SPEC.",
        )
    if name in _OF_THE_LAUNCHER:
        return _Said(
            "env-of-the-launcher",
            f"{name}={variable.value} is set by hand: a launcher that starts one process per GPU sets its own.",
            "Remove it; the launcher derives it from CLUSTER_SPEC.",
            "warning",
        )
    return None


def _of_network(machine_type: str, variable: EnvVar) -> _Said | None:
    name, value = variable.name, variable.value
    if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and not value.startswith("^"):
        return _Said(
            "env-network",
            f"{name}={value} pins an interface whose name Vertex AI does not document.",
            "Remove it; the interface is found without.",
            "warning",
        )
    if name.startswith("FI_EFA_") or (name == "FI_PROVIDER" and "efa" in value.lower()):
        return _Said(
            "env-network", f"{name} is for EFA, a network of AWS; no machine here has it.", "Remove it."
        )
    if kind_of(machine_type) is None or (name == "NCCL_IB_DISABLE" and value == "1"):
        return None
    if machine_type in _SETUPS:
        return _set_up_already(machine_type, name) if _NETWORK.fullmatch(name) else None
    if _RDMA.fullmatch(name) or (name == "NCCL_NET" and value.lower() in ("ib", "gib")):
        return _Said(
            "env-network",
            f"{name}={value} is for InfiniBand or RDMA, which {machine_type} does not have.",
            f"Remove it, or use a machine with RDMA: {', '.join(_SETUPS)}.",
        )
    if machine_type == _TCPXO:
        return _set_up_already(machine_type, name) if _NETWORK.fullmatch(name) else None
    if name == "NCCL_CROSS_NIC" and not _has_gpudirect(machine_type):
        return _Said(
            "env-network",
            f"{name}={value} is about machines with several network cards for their GPUs; {machine_type} is not one.",
            "Remove it.",
            "warning",
        )
    return None


def _set_up_already(machine_type: str, name: str) -> _Said:
    script = nccl_setup(machine_type).script
    whose = f"which {script} configures" if script else "which Vertex AI has configured"
    return _Said(
        "env-network",
        f"{name} is set by hand, but {machine_type} has an NCCL network plugin of its own, {whose}.",
        "Remove it.",
        "warning",
    )


def _has_gpudirect(machine_type: str) -> bool:
    return any(row.has_gpudirect for row in gpu_machines() if row.machine_type == machine_type)
