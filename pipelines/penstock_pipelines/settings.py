"""penstock.toml: where runs go and which images they use. Read by the command only."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_pipelines.errors import InputError
from penstock_pipelines.images import Images

FILE_NAME = "penstock.toml"
_KEYS = ("project", "location", "bucket", "allow_tags", "service_account", "images", "parameters")
_IMAGE_ROLES = ("components", "trainer", "serving")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one project."""

    project: str
    location: str
    bucket: str
    """Without gs://; holds the pipeline root."""
    images: Images
    allow_tags: bool = False
    """Compile although our images have no digest."""
    service_account: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of run time parameters."""

    @property
    def pipeline_root(self) -> str:
        """Where runs keep what they make."""
        return f"gs://{self.bucket}/pipeline-root"


def load_settings(path: Path | None = None) -> Settings:
    """Read `path`, or penstock.toml in the working directory. Raises InputError."""
    path = path or Path(FILE_NAME)
    try:
        told = tomllib.loads(path.read_text())
    except FileNotFoundError as exc:
        raise InputError(
            f"{path} does not exist; run in a directory that has one, or give --settings FILE."
        ) from exc
    except tomllib.TOMLDecodeError as exc:
        raise InputError(f"{path} is not TOML: {exc}") from exc
    _check_keys(path, told, _KEYS)
    _check_types(path, told)
    images = told.pop("images", {})
    _check_keys(path, images, _IMAGE_ROLES, prefix="images.")
    missing = [name for name in ("project", "location", "bucket") if not told.get(name)]
    missing += [f"images.{role}" for role in _IMAGE_ROLES if not images.get(role)]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}; add them.")
    return Settings(images=Images(**images), **told)


def _check_types(path: Path, told: Mapping[str, Any]) -> None:
    types = {"allow_tags": bool, "images": dict, "parameters": dict}
    for key, value in told.items():
        kind = types.get(key, str)
        if not isinstance(value, kind):
            raise InputError(f"{path}: {key} = {value!r} must be a {kind.__name__}.")
    if "/" in told.get("bucket", ""):
        raise InputError(
            f"{path}: bucket = {told['bucket']!r} must be a bucket's name alone, without gs:// and path."
        )


def _check_keys(path: Path, table: Mapping[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {prefix}{nearest[0]}?" if nearest else ""
            raise InputError(f"{path}: unknown key {prefix}{key}.{hint} Known: {', '.join(known)}.")
