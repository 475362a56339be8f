"""The stand-in's identity: a CA that can only vouch for Google's names, one leaf, and a service account nobody knows.

Everything is made anew at each start, readable by the owner only, and short-lived: a stolen file is worth little and
not for long. The CA is name-constrained, so a client that trusts it trusts it for googleapis.com and pkg.dev alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DOMAINS = ("googleapis.com", "pkg.dev")
_LIFETIME = datetime.timedelta(days=7)
_BACKDATE = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Identity:
    """Paths of what a start of the stand-in made, all mode 0600 in a directory of mode 0700."""

    ca_file: Path
    """PEM bundle that clients trust."""
    leaf_file: Path
    """PEM chain that the TLS servers present."""
    leaf_key_file: Path
    credentials_file: Path
    """Application default credentials: a service account with a fresh RSA key."""


def make_identity(directory: Path, *, project_id: str, token_uri: str) -> Identity:
    """Write a new identity into `directory`, replacing an earlier one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    identity = Identity(
        ca_file=directory / "ca.pem",
        leaf_file=directory / "leaf.pem",
        leaf_key_file=directory / "leaf.key",
        credentials_file=directory / "credentials.json",
    )
    ca_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _ca_certificate(ca_key)
    leaf = _leaf_certificate(leaf_key, ca, ca_key)
    _write_private(identity.ca_file, ca.public_bytes(serialization.Encoding.PEM))
    _write_private(
        identity.leaf_file,
        leaf.public_bytes(serialization.Encoding.PEM) + ca.public_bytes(serialization.Encoding.PEM),
    )
    _write_private(identity.leaf_key_file, _pem(leaf_key))
    _write_private(identity.credentials_file, json.dumps(_service_account(project_id, token_uri)).encode())
    return identity


def _ca_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock stand-in, this machine only")])
    # Any address at all is excluded: without this a CA constrained in DNS names alone may still vouch for IPs.
    no_address = [
        x509.IPAddress(ipaddress.ip_network("0.0.0.0/0")),
        x509.IPAddress(ipaddress.ip_network("::/0")),
    ]
    return (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(d) for d in DOMAINS], no_address), critical=True)
        .add_extension(_key_usage(certificate_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf_certificate(
    key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock stand-in")])
    names = [x509.DNSName(f"*.{domain}") for domain in DOMAINS]
    return (
        _builder(name, ca.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_key_usage(certificate_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + _LIFETIME)
    )


def _key_usage(*, certificate_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificate_sign,
        key_cert_sign=certificate_sign,
        crl_sign=certificate_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _service_account(project_id: str, token_uri: str) -> dict[str, str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    email = f"stand-in@{project_id}.iam.gserviceaccount.com"
    return {
        "type": "service_account",
        "project_id": project_id,
        "private_key_id": "penstock-stand-in",
        "private_key": _pem(key).decode(),
        "client_email": email,
        "client_id": "1",
        "token_uri": token_uri,
        "universe_domain": "googleapis.com",
    }


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)
