"""How a job reaches networks: VPC peering or a Private Service Connect interface."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import CustomJobSpec, DnsPeeringConfig, PscInterfaceConfig
from penstock_components.jobs.rules.contents import is_placeholder
from penstock_components.jobs.rules.context import Context

_NAME = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""Of a Compute Engine resource (RFC 1035)."""
_NETWORK = re.compile(rf"projects/(\d+)/global/networks/{_NAME}")
_NETWORK_OF_ID = re.compile(rf"(?:.*/)?projects/([^/]+)/global/networks/({_NAME})")
_ATTACHMENT = re.compile(rf"(?:projects/[^/]+/regions/([a-z0-9-]+)/networkAttachments/)?{_NAME}")


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Peering and PSC interface exclude each other; each in its form. enable_web_access is no matter of networks."""
    psc = spec.psc_interface_config
    if context.through_gcpc and psc == PscInterfaceConfig():
        psc = None  # the op's default
    if spec.network and psc is not None and context.knows("network", "psc_interface_config"):
        yield Finding(
            path="psc_interface_config",
            rule="network-or-psc",
            reason="network (VPC peering) and psc_interface_config (PSC interface) exclude each other.",
            fix="Keep one: network for addresses of a peered range, psc_interface_config for a network attachment.",
        )
    if spec.network and not is_placeholder(spec.network) and not _NETWORK.fullmatch(spec.network):
        yield _network_form(spec.network)
    yield from _ranges(spec, context)
    if psc is not None:
        yield from _attachment(psc, context)
        for index, peering in enumerate(psc.dns_peering_configs):
            yield from _dns(f"psc_interface_config.dns_peering_configs[{index}]", peering)


def _network_form(text: str) -> Finding:
    match = _NETWORK_OF_ID.fullmatch(text)
    if match is None:
        reason = f"{quoted(text)} is not the full name of a network."
        fix = "Write projects/<project number>/global/networks/<name>."
    elif match[1].isdecimal():
        reason = f"{quoted(text)} is a URL."
        fix = f"Write projects/{match[1]}/global/networks/{match[2]}."
    else:
        reason = f"it names the project by its ID, {match[1]}; the API takes its number."
        fix = (
            f"Write projects/<number>/global/networks/{match[2]}, with the number that `gcloud projects describe {match[1]} "
            "--format='value(projectNumber)'` prints."
        )
    return Finding(
        path="network",
        rule="network-form",
        reason=reason,
        fix=f"{fix} For a Shared VPC it is the host project's.",
    )


def _ranges(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    path = "reserved_ip_ranges"
    if spec.reserved_ip_ranges and not spec.network and context.knows("network"):
        yield Finding(
            path=path,
            rule="ranges-without-network",
            reason="ranges are reserved in a peered network, and the job has none.",
            fix="Set network, or remove them; with a PSC interface addresses come from the attachment's subnet.",
        )
        return
    for index, text in enumerate(spec.reserved_ip_ranges):
        if is_placeholder(text) or re.fullmatch(_NAME, text):
            continue
        kind = "an address, not a name" if _is_address(text) else "no name of a range"
        yield Finding(
            path=f"{path}[{index}]",
            rule="range-name",
            reason=f"{quoted(text)} is {kind}; the field holds names of ranges that were allocated for the peering.",
            fix="Write a name that `gcloud compute addresses list --global --filter=purpose=VPC_PEERING` prints, such as "
            "vertex-ai-ip-range.",
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _attachment(psc: PscInterfaceConfig, context: Context) -> Iterator[Finding]:
    path, text = "psc_interface_config.network_attachment", psc.network_attachment
    if is_placeholder(text):
        return
    match = _ATTACHMENT.fullmatch(text)
    if match is None:
        yield Finding(
            path=path,
            rule="network-attachment",
            reason=f"{quoted(text)} names no network attachment." if text else "it is missing.",
            fix="Write projects/<project>/regions/<region>/networkAttachments/<name>; a service attachment is another thing.",
        )
    elif match[1] and context.location not in ("", match[1]) and not is_placeholder(context.location):
        yield Finding(
            path=path,
            rule="network-attachment-region",
            reason=f"the attachment is in {match[1]}, the job in {context.location}; it has to be in the job's region.",
            fix=f"Create an attachment in {context.location}, or run the job in {match[1]}.",
        )


def _dns(path: str, peering: DnsPeeringConfig) -> Iterator[Finding]:
    fixes = {
        "domain": "Write the DNS name of the zone, such as corp.example.internal. with its dot at the end.",
        "target_project": "Write the ID of the project that holds the zone.",
        "target_network": "Write the name of the network in which the zone is seen.",
    }
    for name, fix in fixes.items():
        if not getattr(peering, name):
            yield Finding(path=f"{path}.{name}", rule="required", reason="it is missing.", fix=fix)
    if peering.domain and not peering.domain.endswith(".") and not is_placeholder(peering.domain):
        yield Finding(
            path=f"{path}.domain",
            rule="dns-domain",
            reason=f"{quoted(peering.domain)} does not end with a dot.",
            fix=f"Write {peering.domain}. with the dot.",
        )
    if "/" in peering.target_network and not is_placeholder(peering.target_network):
        yield Finding(
            path=f"{path}.target_network",
            rule="dns-network",
            reason=f"{quoted(peering.target_network)} is a path; the field holds the network's name in target_project.",
            fix=f"Write {peering.target_network.rstrip('/').rpartition('/')[2] or 'its name'}.",
        )
