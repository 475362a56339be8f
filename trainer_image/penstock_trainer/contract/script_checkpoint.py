"""The copy of a script's checkpoint directory: what lies in storage for each node, and the manifest that names it.

    <uri>/node-0/manifest.json                     written last; readers trust nothing else
    <uri>/node-0/files/<writer>-<n>/<name>         a file as it stood at the n-th sync of one launcher

What the manifest does not name is garbage of a sync that did not get to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from penstock_trainer.contract.fields import canonical_json, parse_json, require, require_version

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFile:
    """One file of the directory, and the object that holds its bytes."""

    name: str
    """Path under the directory, such as `step-100/model.pt`."""
    object_name: str
    """Path under the node's URI."""
    generation: int
    size: int
    """Bytes."""
    crc32c: str
    """Base64 of the big-endian CRC32C, as Cloud Storage reports it."""

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        inside = bool(self.name) and not path.is_absolute() and ".." not in path.parts
        require(inside, "name", self.name, "a path under the directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptManifest:
    """The files of one node's directory."""

    format_version: int
    writer: str
    """The launcher that wrote it; names of its objects begin with it."""
    files: tuple[ScriptFile, ...]

    def __post_init__(self) -> None:
        require_version(
            self.format_version,
            FORMAT_VERSION,
            "copy of a checkpoint directory",
            "use a penstock that is at least as new as the one that wrote it",
        )
        names = [file.name for file in self.files]
        require(len(set(names)) == len(names), "files", names, "named once each")

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> ScriptManifest:
        """Raises ContractError: not JSON, another format version, or a field that is missing or ill-typed."""
        return parse_json(cls, text, "the manifest of a checkpoint directory")


def node_uri(uri: str, node_rank: int) -> str:
    """Where a node's files lie, without a trailing slash."""
    return f"{uri.rstrip('/')}/node-{node_rank}"


def script_manifest_uri(node_uri: str) -> str:
    """The object that names the node's files."""
    return f"{node_uri}/manifest.json"
