"""The checkpoint layout: where a step's objects lie, and the manifest that makes them a checkpoint.

    <root>/owner.json                                {attempt, fencing_token}: who may write
    <root>/step-00000100/<attempt>/<rank>-<n>.distcp raw little-endian tensor bytes, a few objects a rank
    <root>/step-00000100/<attempt>/index.json        which chunk of which tensor lies where
    <root>/step-00000100/manifest.json               written last; readers trust nothing else

What no manifest names is garbage of an attempt that did not get to its end.

Formats: 1 has one object a rank and tensors of any size in one chunk; 2 has objects of at most about 64 MiB, so that
they can be written at once and each be sent again alone, and tells when it was saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from penstock_trainer.contract.fields import (
    canonical_json,
    from_dict,
    load_json,
    parse_json,
    require,
    require_version,
)

FORMAT_VERSION = 2
"""Of what is written."""
OLDEST_FORMAT = 1
"""That is read."""
_STEP_DIR = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointObject:
    """One object of a checkpoint, pinned to the bytes that were written."""

    name: str
    """Path under the step directory, such as `a1b2c3/0.distcp`."""
    generation: int
    size: int
    """Bytes."""
    crc32c: str
    """Base64 of the big-endian CRC32C, as Cloud Storage reports it."""
    sha256: str
    """Hex."""

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        inside = bool(self.name) and not path.is_absolute() and ".." not in path.parts
        require(inside, "name", self.name, "a path under the directory of its manifest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step that a run's evaluations found best."""

    step: int
    value: float
    """Of evaluation.metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a reader needs to continue from a step, and to refuse it when an object is not the one that was written."""

    format_version: int
    step: int
    """Optimizer steps done."""
    samples_seen: int
    """Sequences consumed since the run began: the data position, independent of the world size."""
    tokens_seen: int
    """Targets that were trained on."""
    best: Best | None = None
    stale_evaluations: int = 0
    """Evaluations since the best one."""
    config: Mapping[str, Any]
    """The JobConfig that wrote it, as JSON types."""
    config_hash: str
    tokenizer_sha256: str
    """Hex digest of the tokenizer.json of the dataset that it was trained on: the meaning of the token ids."""
    strategy: str
    world_size: int
    versions: Mapping[str, str]
    """Of torch, deepspeed (where used) and penstock."""
    attempt: str
    fencing_token: int
    index: str
    """Name of the index object among `objects`."""
    objects: tuple[CheckpointObject, ...]
    saved_at: float = 0.0
    """Seconds since the epoch when it was committed, by the clock of the primary; 0 in format 1."""

    def __post_init__(self) -> None:
        _require_known(self.format_version)
        names = [entry.name for entry in self.objects]
        require(self.index in names, "index", self.index, "one of the objects")
        require(len(set(names)) == len(names), "objects", names, "named once each")

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(entry.size for entry in self.objects)

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises UnknownFormatError, and ContractError: not JSON, or a field that is missing or ill-typed."""
        told = load_json(text, "the checkpoint manifest")
        if isinstance(told, dict) and isinstance(version := told.get("format_version"), int):
            _require_known(version)  # before its fields, which another format may have more of
        return from_dict(cls, told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who may write below a checkpoint root. A writer that finds a higher token than its own stops."""

    attempt: str
    fencing_token: int

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner:
        """Raises ContractError when the text is not an owner."""
        return parse_json(cls, text, "the checkpoint owner")


def _require_known(format_version: int) -> None:
    remedy = "use a penstock that is at least as new as the one that wrote it"
    require_version(format_version, FORMAT_VERSION, "checkpoint", remedy, oldest=OLDEST_FORMAT)


def step_dir_uri(root_uri: str, step: int) -> str:
    """Directory of one step, without a trailing slash."""
    return f"{root_uri.rstrip('/')}/step-{step:08d}"


def manifest_uri(root_uri: str, step: int) -> str:
    """The object whose existence makes the step a checkpoint."""
    return f"{step_dir_uri(root_uri, step)}/manifest.json"


def owner_uri(root_uri: str) -> str:
    """The object that fences writers of this root."""
    return f"{root_uri.rstrip('/')}/owner.json"


def step_of(step_dir: str) -> int | None:
    """The step that a directory is named for, or None if it is not a step directory."""
    match = _STEP_DIR.search(step_dir.rstrip("/"))
    return int(match.group(1)) if match else None
