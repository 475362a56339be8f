"""Artifacts as tasks exchange them, and the resource names they carry."""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """One input or output artifact of a task."""

    name: str
    """Full resource name in the metadata store; identifies the artifact in cache keys."""
    uri: str
    schema_title: str
    """Type, such as `system.Model` or `google.VertexModel`."""
    schema_version: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_runtime_json(self) -> dict[str, Any]:
        """The `RuntimeArtifact` JSON inside an ExecutorInput."""
        return {
            "name": self.name,
            "uri": self.uri,
            "type": {"schemaTitle": self.schema_title, "schemaVersion": self.schema_version},
            "metadata": dict(self.metadata),
        }


def new_artifact_id() -> str:
    """An id as the metadata store gives to an artifact that it has not seen."""
    return str(random.getrandbits(63))


def imported_artifact_id(uri: str, schema_title: str, metadata: Mapping[str, Any]) -> str:
    """The id that importing the same thing again yields, which is what `reimport=False` means."""
    identity = json.dumps([uri, schema_title, metadata], sort_keys=True)
    return str(int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") >> 1)
