"""The Vertex AI Model Registry: the versions of a model, their aliases, and adding one."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_components.launchers.errors import InputError, RegistryError

log = logging.getLogger(__name__)

CHAMPION = "champion"
CHALLENGER = "challenger"
DEFAULT = "default"
RUN_LABEL = "penstock-run"

UPLOAD_TIMEOUT_SECONDS = 3600
_MODEL_ID = re.compile(r"[a-z_][a-z0-9_-]{0,62}")
_MAX_LABEL = 63


class ModelClient(Protocol):
    """What is used of google.cloud.aiplatform_v1.ModelServiceClient; a seam, so that the logic runs without gRPC."""

    def list_model_versions(self, *, request: Mapping[str, Any]) -> Iterable[Any]:
        """Versions of the model `name`, all pages. Raises google.api_core.exceptions.NotFound."""

    def upload_model(self, *, request: Mapping[str, Any]) -> Any:
        """A long-running operation whose result has `model` and `model_version_id`."""

    def merge_version_aliases(self, *, request: Mapping[str, Any]) -> Any:
        """Add aliases to the version `name`, or remove those that begin with `-`; the version afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """One version of a model."""

    model_name: str
    """projects/P/locations/L/models/M"""
    version_id: str
    aliases: tuple[str, ...]
    artifact_uri: str
    labels: Mapping[str, str]

    @property
    def resource_name(self) -> str:
        """projects/P/locations/L/models/M@VERSION"""
        return f"{self.model_name}@{self.version_id}"


class Registry:
    """The models of one project and location. Methods block on the network and raise RegistryError."""

    def __init__(self, client: ModelClient, *, project: str, location: str) -> None:
        self._client = client
        self._parent = f"projects/{project}/locations/{location}"

    def versions(self, model_id: str) -> list[RegisteredVersion]:
        """Every version of the model; none if there is no such model. Raises InputError for an impossible id."""
        from google.api_core.exceptions import NotFound

        check_model_id(model_id)
        name = self._model_name(model_id)
        with _translated(f"listing the versions of {name}"):
            try:
                return [_version(model) for model in self._client.list_model_versions(request={"name": name})]
            except NotFound:
                return []

    def find_version(self, model_id: str, alias: str) -> RegisteredVersion | None:
        """The version that carries the alias, or None: no such model, or no version has it."""
        return next((version for version in self.versions(model_id) if alias in version.aliases), None)

    def upload(self, model_id: str, model: Mapping[str, Any]) -> RegisteredVersion:
        """Add a version, the first one creating the model; blocks until the service has it.

        It gets no alias here, except that the service makes the first version of a model its default.
        """
        request: dict[str, Any] = {"parent": self._parent, "model": dict(model)}
        if self.versions(model_id):
            request["parent_model"] = self._model_name(model_id)
        else:
            request["model_id"] = model_id
        with _translated(f"uploading a version of {self._model_name(model_id)}"):
            done = self._client.upload_model(request=request).result(timeout=UPLOAD_TIMEOUT_SECONDS)
        uploaded = RegisteredVersion(
            model_name=self._model_name(model_id),
            version_id=done.model_version_id,
            aliases=(),
            artifact_uri=model["artifact_uri"],
            labels=model["labels"],
        )
        log.info("uploaded %s", uploaded.resource_name)
        return uploaded

    def move_aliases(self, version: RegisteredVersion, aliases: Sequence[str]) -> RegisteredVersion:
        """Give the version these aliases, in one request: other versions lose them at the same moment.

        Source: "An alias can only be assigned to a single version, by model, at a time"; "applying an existing alias
        that is used by another version removes it from that version" (cloud.google.com/vertex-ai/docs/model-registry/
        model-alias). So there is no moment without a champion, and `default`, which cannot be removed, can be moved.
        """
        missing = [alias for alias in aliases if alias not in version.aliases]
        if not missing:
            return version
        with _translated(f"moving {', '.join(missing)} to {version.resource_name}"):
            request = {"name": version.resource_name, "version_aliases": missing}
            model = self._client.merge_version_aliases(request=request)
        log.info("moved %s to %s", ", ".join(missing), version.resource_name)
        return _version(model)

    def _model_name(self, model_id: str) -> str:
        return f"{self._parent}/models/{model_id}"


def check_model_id(model_id: str) -> None:
    """Raises InputError for an id that the registry does not take."""
    if not _MODEL_ID.fullmatch(model_id):
        raise InputError(
            f"model_id = {model_id!r} is not valid: it must have 1 to 63 of the characters a-z, 0-9, _ and -, and begin "
            "with a letter or _."
        )


def connect(*, project: str, location: str) -> Registry:
    """The registry behind the location's endpoint, with application default credentials."""
    # Imported here: it takes seconds, and most launchers have no use for it.
    from google.cloud.aiplatform_v1 import ModelServiceClient

    client = ModelServiceClient(client_options={"api_endpoint": f"{location}-aiplatform.googleapis.com"})
    return Registry(client, project=project, location=location)


def label_value(text: str) -> str:
    """`text` as a label's value; one that had to be changed ends in a hash, so that two runs never share a label."""
    label = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    if label == text and len(label) <= _MAX_LABEL:
        return label
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{label[: _MAX_LABEL - 9]}-{digest}"


@contextmanager
def _translated(what: str) -> Iterator[None]:
    from google.api_core.exceptions import GoogleAPICallError

    try:
        yield
    except GoogleAPICallError as exc:
        raise RegistryError(
            f"{what} failed: {exc}. Check project and location, and that the task's service account may use the registry "
            "(roles/aiplatform.user)."
        ) from exc


def _version(model: Any) -> RegisteredVersion:
    """Names of listed versions carry @VERSION, others do not."""
    return RegisteredVersion(
        model_name=model.name.partition("@")[0],
        version_id=model.version_id,
        aliases=tuple(model.version_aliases),
        artifact_uri=model.artifact_uri,
        labels=dict(model.labels),
    )
