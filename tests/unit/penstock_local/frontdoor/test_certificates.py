from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from penstock_local.frontdoor import certificates
from penstock_local.frontdoor.certificates import Identity, make_identity


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    directory = tmp_path_factory.mktemp("identity") / "tls"
    return make_identity(directory, project_id="demo", token_uri="http://127.0.0.1:1/token")


def verify(name: str, leaf: x509.Certificate, ca: x509.Certificate) -> None:
    verifier = PolicyBuilder().store(Store([ca])).build_server_verifier(x509.DNSName(name))
    verifier.verify(leaf, [])


def load(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


@pytest.mark.parametrize(
    "name", ["storage.googleapis.com", "us-central1-aiplatform.googleapis.com", "us-docker.pkg.dev"]
)
def test_the_leaf_speaks_for_googles_names(identity: Identity, name: str) -> None:
    verify(name, load(identity.leaf_file)[0], load(identity.ca_file)[0])


@pytest.mark.parametrize("name", ["example.com", "localhost", "googleapis.com.evil.example"])
def test_the_leaf_speaks_for_nobody_else(identity: Identity, name: str) -> None:
    with pytest.raises(VerificationError):
        verify(name, load(identity.leaf_file)[0], load(identity.ca_file)[0])


@pytest.mark.parametrize("name", ["storage.googleapis.com", "example.com", "googleapis.com.evil.example"])
def test_even_with_its_key_the_ca_cannot_vouch_for_another_domain(name: str) -> None:
    key, ca_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = certificates._ca_certificate(ca_key)
    now = datetime.datetime.now(datetime.UTC)
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    if name == "storage.googleapis.com":
        verify(name, leaf, ca)
    else:
        with pytest.raises(VerificationError):
            verify(name, leaf, ca)


def test_every_file_is_its_owners_alone(identity: Identity) -> None:
    for path in (identity.ca_file, identity.leaf_file, identity.leaf_key_file, identity.credentials_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.ca_file.parent.stat().st_mode) == 0o700


def test_certificates_end_within_days_and_no_key_of_the_ca_is_kept(identity: Identity) -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=8)
    for certificate in load(identity.leaf_file):
        assert certificate.not_valid_after_utc < soon
    kept = {path.name for path in identity.ca_file.parent.iterdir()}
    assert kept == {"ca.pem", "leaf.pem", "leaf.key", "credentials.json"}
    leaf_key = load_pem_private_key(identity.leaf_key_file.read_bytes(), None)
    assert leaf_key.public_key() == load(identity.leaf_file)[0].public_key()


def test_a_second_identity_replaces_the_first(tmp_path: Path) -> None:
    first = make_identity(tmp_path, project_id="demo", token_uri="x")
    before = first.credentials_file.read_text()
    second = make_identity(tmp_path, project_id="demo", token_uri="x")
    assert first == second
    assert json.loads(before)["private_key"] != json.loads(second.credentials_file.read_text())["private_key"]
