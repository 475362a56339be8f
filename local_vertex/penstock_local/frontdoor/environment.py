"""The environment variables that lead unmodified clients to the stand-in. Nothing else does: no client is patched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_local.frontdoor.certificates import Identity

# A proxy of the user's would take the requests out of the machine; each is replaced or removed.
_FOREIGN_PROXIES = (
    "http_proxy",
    "HTTP_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "grpc_proxy",
    "GRPC_PROXY",
    "no_grpc_proxy",
)
# These would send Google's clients elsewhere, or make them anonymous.
_FOREIGN_ENDPOINTS = (
    "STORAGE_EMULATOR_HOST",
    "GCE_METADATA_HOST",
    "CLOUDSDK_CORE_PROJECT",
    "GOOGLE_API_USE_MTLS_ENDPOINT",
)


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """What to set and what to unset in a client's environment."""

    set: Mapping[str, str]
    unset: tuple[str, ...]

    def applied_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A copy of `environ` in which clients find the stand-in."""
        return {key: value for key, value in environ.items() if key not in self.unset} | dict(self.set)


def client_environment(
    identity: Identity, *, front_port: int, project_id: str, location: str
) -> ClientEnvironment:
    """The variables for a stand-in whose front door listens on `front_port`."""
    proxy, direct, ca = f"http://127.0.0.1:{front_port}", "127.0.0.1,localhost", str(identity.ca_file)
    return ClientEnvironment(
        set={
            # gRPC core reads only the lower-case names, other clients either.
            "https_proxy": proxy,
            "HTTPS_PROXY": proxy,
            "no_proxy": direct,
            "NO_PROXY": direct,
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": ca,
            "REQUESTS_CA_BUNDLE": ca,
            "SSL_CERT_FILE": ca,
            "GOOGLE_APPLICATION_CREDENTIALS": str(identity.credentials_file),
            "GOOGLE_CLOUD_PROJECT": project_id,
            "GOOGLE_CLOUD_REGION": location,  # aiplatform.init() takes its default location from here
        },
        unset=(*_FOREIGN_PROXIES, *_FOREIGN_ENDPOINTS),
    )
