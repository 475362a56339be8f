"""Refreshing the catalogue: what Compute Engine says of its rows, and nothing that it does not say."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from penstock_components.machines.refresh import RefreshError, fetch, renewed
from penstock_components.machines.tables import render, tables
from unit.penstock_components.machines.compute_engine import PROJECT, TOKEN, machine_type, scope, serving

A100 = machine_type("a2-highgpu-8g", vcpus=96, memory_mb=696320, gpus=("nvidia-tesla-a100", 8))
L4 = machine_type("g2-standard-12", vcpus=12, memory_mb=49152, gpus=("nvidia-l4", 1))
N1 = machine_type("n1-highcpu-16", vcpus=16, memory_mb=14746)
EDGE = machine_type("a3-edgegpu-8g", vcpus=208, memory_mb=1916928, gpus=("nvidia-h100-80gb", 8))
NEW = machine_type("a3-newgpu-8g", vcpus=208, memory_mb=1916928, gpus=("nvidia-h100-80gb", 8))
TPU = machine_type("ct6e-standard-4t", vcpus=180, memory_mb=737280, gpus=("ct6e", 4))
PAGES = (
    {"items": scope("us-central1-a", A100, N1) | scope("us-central1-b") | scope("europe-west4-a")},
    {
        "items": scope("us-central1-a")
        | scope("us-central1-b", A100)
        | scope("europe-west4-a", A100, L4, N1, EDGE)
    },
    {"items": scope("europe-west4-a", NEW, TPU) | scope("us-central1-b")},
)


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        made.headers["Authorization"] = f"Bearer {TOKEN}"
        yield made


def asked(session: requests.Session, *pages: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    with serving(*pages) as endpoint:
        offers = fetch(session, project=PROJECT, endpoint=endpoint)
    return renewed(tables(), offers, today="2027-01-02")


def row(held: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in held["gpu_machines"] if each["machine_type"] == name)


def test_all_pages_are_read_and_zones_become_regions(session: requests.Session) -> None:
    new, lines = asked(session, *PAGES)
    assert new["compute_engine_date"] == "2027-01-02"
    assert new["compute_engine_regions"] == {
        "a2-highgpu-8g": ["europe-west4", "us-central1"],
        "g2-standard-12": ["europe-west4"],
        "n1-highcpu-16": ["europe-west4", "us-central1"],
        "ct6e-standard-4t": ["europe-west4"],
    }
    assert "a2-highgpu-8g: regions of Compute Engine +europe-west4 +us-central1" in lines


def test_rows_that_agree_stay_and_vertex_facts_are_not_touched(session: requests.Session) -> None:
    new, _ = asked(session, *PAGES)
    changed = {key for key, value in new.items() if value != tables()[key]}
    assert changed == {"compute_engine_date", "compute_engine_regions"}


def test_changed_figures_are_written_and_told(session: requests.Session) -> None:
    other = machine_type("a2-highgpu-8g", vcpus=100, memory_mb=716800, gpus=("nvidia-tesla-a100", 6))
    new, lines = asked(session, {"items": scope("us-central1-a", other)})
    a100 = row(new, "a2-highgpu-8g")
    assert (a100["vcpus"], a100["memory_gb"], a100["accelerator_counts"]) == (100, 700, [6])
    assert "a2-highgpu-8g: vcpus 96 -> 100" in lines
    assert "a2-highgpu-8g: memory_gb 680 -> 700" in lines
    assert "a2-highgpu-8g: accelerator_counts [8] -> [6]" in lines
    assert row(tables(), "a2-highgpu-8g")["vcpus"] == 96


def test_another_accelerator_is_told_and_not_written(session: requests.Session) -> None:
    other = machine_type("a2-highgpu-8g", vcpus=96, memory_mb=696320, gpus=("nvidia-a100-40gb", 4))
    new, lines = asked(session, {"items": scope("us-central1-a", other)})
    assert row(new, "a2-highgpu-8g") == row(tables(), "a2-highgpu-8g")
    assert any("Compute Engine has it with 4 x nvidia-a100-40gb" in line for line in lines)


def test_types_that_the_catalogue_lacks_are_told_and_not_added(session: requests.Session) -> None:
    new, lines = asked(session, *PAGES)
    assert {each["machine_type"] for each in new["gpu_machines"]} == {
        each["machine_type"] for each in tables()["gpu_machines"]
    }
    assert [line.split(":")[0] for line in lines if "look whether" in line] == [
        "a3-edgegpu-8g",
        "a3-newgpu-8g",
    ]
    assert any("known not to be on Vertex AI's list" in line for line in lines if "a3-edgegpu-8g" in line)


def test_rows_that_compute_engine_has_not_stay_and_are_told(session: requests.Session) -> None:
    _, lines = asked(session, *PAGES)
    assert "g2-standard-8: not among Compute Engine's machine types; left as it is" in lines
    assert not any(line.startswith("cloud-tpu") for line in lines)


def test_regions_that_a_type_has_left_are_told(session: requests.Session) -> None:
    held = copy.deepcopy(tables())
    held["compute_engine_regions"] = {"a2-highgpu-8g": ["us-central1", "us-east4"]}
    with serving(*PAGES) as endpoint:
        offers = fetch(session, project=PROJECT, endpoint=endpoint)
    _, lines = renewed(held, offers, today="2027-01-02")
    assert "a2-highgpu-8g: regions of Compute Engine +europe-west4 -us-east4" in lines


def test_an_answer_that_misses_zones_changes_nothing(session: requests.Session) -> None:
    unreachable = {"code": "UNREACHABLE", "message": "zone us-east1-b did not answer"}
    for page in (
        {"items": scope("us-central1-a", A100) | {"zones/us-east1-b": {"warning": unreachable}}},
        {"items": scope("us-central1-a", A100), "unreachables": ["zones/us-east1-b"]},
    ):
        with serving(page) as endpoint, pytest.raises(RefreshError, match=r"not whole .*us-east1-b"):
            fetch(session, project=PROJECT, endpoint=endpoint)


def test_a_refusal_is_passed_on(session: requests.Session) -> None:
    with (
        serving(status=403) as endpoint,
        pytest.raises(RefreshError, match=r"status 403: .*has not been used"),
    ):
        fetch(session, project=PROJECT, endpoint=endpoint)
    with pytest.raises(RefreshError, match="did not answer"):
        fetch(session, project=PROJECT, endpoint=endpoint)


def test_the_file_is_as_its_renderer_writes_it() -> None:
    assert json.loads(render(tables())) == tables()
    kept = Path(sys.modules["penstock_components.machines.tables"].__file__ or "").with_name("machines.json")
    assert kept.read_text() == render(tables())


def service_account(directory: Path, token_uri: str) -> Path:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / "key.json"
    told = {
        "type": "service_account",
        "project_id": PROJECT,
        "client_email": f"reader@{PROJECT}.iam.gserviceaccount.com",
        "private_key": key.decode(),
        "token_uri": token_uri,
    }
    path.write_text(json.dumps(told))
    return path


def run(endpoint: str, credentials: Path, file: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GOOGLE_APPLICATION_CREDENTIALS": str(credentials), "NO_PROXY": "127.0.0.1"}
    module = ["-m", "penstock_components.machines.refresh", "--endpoint", endpoint, "--file", str(file)]
    return subprocess.run(
        [sys.executable, *module], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_rewrites_the_file_with_application_default_credentials(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    file.write_text(render(tables()))
    with serving(*PAGES) as endpoint:
        credentials = service_account(tmp_path, f"{endpoint}/token")
        done = run(endpoint, credentials, file)
        assert (done.returncode, done.stderr) == (0, "")
        assert "a2-highgpu-8g: regions of Compute Engine +europe-west4 +us-central1" in done.stdout
        first = file.read_text()
        again = run(endpoint, credentials, file)
    assert json.loads(first)["compute_engine_regions"]["g2-standard-12"] == ["europe-west4"]
    assert file.read_text() == first
    assert "->" not in again.stdout
    with serving(status=403) as endpoint:
        refused = run(endpoint, service_account(tmp_path, f"{endpoint}/token"), file)
    assert (refused.returncode, file.read_text()) == (1, first)
    assert "refresh: Compute Engine refused with status 403" in refused.stderr
