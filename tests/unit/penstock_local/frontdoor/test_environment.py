from __future__ import annotations

from pathlib import Path

from penstock_local.frontdoor.certificates import Identity
from penstock_local.frontdoor.environment import client_environment


def test_the_users_proxies_and_endpoints_give_way_and_the_rest_stays() -> None:
    identity = Identity(Path("/ca"), Path("/leaf"), Path("/key"), Path("/adc"))
    environment = client_environment(identity, front_port=8080, project_id="demo", location="us-central1")
    users = {
        "HOME": "/home/me",
        "https_proxy": "http://corporate:3128",
        "ALL_PROXY": "socks5://corporate",
        "STORAGE_EMULATOR_HOST": "http://localhost:9000",
        "GOOGLE_CLOUD_PROJECT": "production",
    }
    told = environment.applied_to(users)
    assert told["HOME"] == "/home/me"
    assert told["https_proxy"] == told["HTTPS_PROXY"] == "http://127.0.0.1:8080"
    assert told["GOOGLE_CLOUD_PROJECT"] == "demo"
    assert (
        told["SSL_CERT_FILE"]
        == told["REQUESTS_CA_BUNDLE"]
        == told["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"]
        == "/ca"
    )
    assert "ALL_PROXY" not in told
    assert "STORAGE_EMULATOR_HOST" not in told
    assert users["https_proxy"] == "http://corporate:3128"
