"""Networks that a job cannot reach, one fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_components.jobs.messages import DnsPeeringConfig, PscInterfaceConfig
from unit.penstock_components.jobs.rules.specs import NETWORK, PSC, findings, job, refused


def test_peering_and_psc_interface_exclude_each_other() -> None:
    spec = job(network=NETWORK, psc_interface_config=PSC)
    refused(spec, "psc_interface_config", "network-or-psc", "exclude each other", "Keep one")


@pytest.mark.parametrize("later", ["network", "psc_interface_config"])
def test_a_network_of_the_run_is_not_judged_before_it(later: str) -> None:
    unknown = frozenset({later})
    assert findings(job(network=NETWORK, psc_interface_config=PSC), unknown=unknown) == []
    ranges = job(reserved_ip_ranges=("vertex-ai-ip-range",))
    assert bool(findings(ranges, unknown=unknown)) == (later != "network")
    placeholder = job(network="{{$.inputs.parameters['network']}}", psc_interface_config=PSC)
    assert findings(placeholder) == []
    assert findings(replace(placeholder, reserved_ip_ranges=("vertex-ai-ip-range",))) == []


def test_an_attachment_is_not_compared_with_a_region_of_the_run() -> None:
    assert findings(job(psc_interface_config=PSC), location="{{$.inputs.parameters['location']}}") == []


def test_an_empty_psc_interface_is_the_default_of_the_op_and_no_fault() -> None:
    assert findings(job(network=NETWORK, psc_interface_config=PscInterfaceConfig()), through_gcpc=True) == []


def test_a_psc_interface_without_attachment_is_refused_where_nobody_puts_it_in() -> None:
    spec = job(psc_interface_config=PscInterfaceConfig())
    refused(spec, "psc_interface_config.network_attachment", "network-attachment", "missing")
    assert [
        each.rule for each in findings(job(network=NETWORK, psc_interface_config=PSC), through_gcpc=True)
    ] == ["network-or-psc"]


def test_a_project_id_in_a_network_is_told_to_be_a_number() -> None:
    refused(
        job(network="projects/my-project/global/networks/training"),
        "network",
        "network-form",
        "by its ID, my-project",
        "projects/<number>/global/networks/training",
        "gcloud projects describe my-project",
        "host project",
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("training", ("not the full name",)),
        (
            "https://www.googleapis.com/compute/v1/projects/123/global/networks/training",
            ("is a URL", "Write projects/123/global/networks/training."),
        ),
        ("projects/123/regions/europe-west4/subnetworks/training", ("not the full name",)),
    ],
)
def test_a_network_has_its_full_name(name: str, words: tuple[str, ...]) -> None:
    refused(job(network=name), "network", "network-form", *words)


@pytest.mark.parametrize("name", ["10.128.0.0/20", "172.16.0.0/16", "10.0.0.1"])
def test_an_address_is_no_name_of_a_reserved_range(name: str) -> None:
    refused(
        job(network=NETWORK, reserved_ip_ranges=("vertex-ai-ip-range", name)),
        "reserved_ip_ranges[1]",
        "range-name",
        f"'{name}' is an address, not a name",
        "vertex-ai-ip-range",
    )


def test_an_odd_name_of_a_range_is_refused() -> None:
    spec = job(network=NETWORK, reserved_ip_ranges=("My Range",))
    refused(spec, "reserved_ip_ranges[0]", "range-name", "no name of a range")


@pytest.mark.parametrize("psc", [None, PSC])
def test_reserved_ranges_go_with_a_peered_network_only(psc: PscInterfaceConfig | None) -> None:
    spec = job(reserved_ip_ranges=("10.128.0.0/20",), psc_interface_config=psc)
    refused(spec, "reserved_ip_ranges", "ranges-without-network", "the job has none", "attachment's subnet")


@pytest.mark.parametrize("name", ["training", PSC.network_attachment])
def test_an_attachment_is_named_shortly_or_fully(name: str) -> None:
    assert findings(job(psc_interface_config=PscInterfaceConfig(network_attachment=name))) == []


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "missing"),
        ("projects/p/regions/europe-west4/serviceAttachments/a", "names no network attachment"),
    ],
)
def test_an_attachment_is_a_network_attachment(name: str, word: str) -> None:
    spec = job(psc_interface_config=replace(PSC, network_attachment=name))
    refused(
        spec,
        "psc_interface_config.network_attachment",
        "network-attachment",
        word,
        "networkAttachments/<name>",
    )


def test_an_attachment_of_another_region_is_refused() -> None:
    refused(
        job(psc_interface_config=PSC),
        "psc_interface_config.network_attachment",
        "network-attachment-region",
        "in europe-west4, the job in us-central1",
        location="us-central1",
    )


@pytest.mark.parametrize(
    ("field", "value", "rule", "word"),
    [
        ("domain", "", "required", "dot at the end"),
        ("domain", "corp.example.internal", "dns-domain", "Write corp.example.internal. with the dot"),
        ("target_project", "", "required", "holds the zone"),
        ("target_network", "", "required", "name of the network"),
        ("target_network", "projects/p/global/networks/n", "dns-network", "Write n."),
    ],
)
def test_a_dns_peering_is_complete(field: str, value: str, rule: str, word: str) -> None:
    whole = DnsPeeringConfig(domain="a.internal.", target_project="p", target_network="n")
    spec = job(psc_interface_config=replace(PSC, dns_peering_configs=(replace(whole, **{field: value}),)))
    refused(spec, f"psc_interface_config.dns_peering_configs[0].{field}", rule, word)


def test_an_interactive_shell_is_no_matter_of_networks() -> None:
    assert findings(job(network=NETWORK, enable_web_access=True)) == []
    assert findings(job(enable_web_access=True)) == []
