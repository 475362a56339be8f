"""Buckets and objects as values: what they carry, how they may be named, and the conditions on changing them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock_local.storage.errors import InvalidRequestError, NotModifiedError, PreconditionFailedError

_BUCKET_NAME = re.compile(r"(?=.{3,222}$)[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_IP_ADDRESS = re.compile(r"\d+(\.\d+){3}")
_OBJECT_NAME_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """What the writer of an object may say about it, and what a patch may change."""

    content_type: str = "application/octet-stream"
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    custom_time: str | None = None
    """RFC 3339, kept as given."""
    storage_class: str = "STANDARD"
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One bucket."""

    name: str
    location: str
    generation: int
    """Microseconds since the epoch at its creation."""
    metageneration: int
    updated: datetime
    storage_class: str
    labels: Mapping[str, str]

    @property
    def time_created(self) -> datetime:
        """UTC."""
        return from_microseconds(self.generation)

    @property
    def etag(self) -> str:
        """Changes with every change of the metadata."""
        return _etag(self.generation, self.metageneration)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    generation: int
    """Microseconds since the epoch at its creation, never given twice."""
    metageneration: int
    """1 when written; each change of the attributes adds one."""
    size: int
    """Bytes."""
    crc32c: str
    """Base64 of the big-endian checksum."""
    md5: str | None
    """Base64; None for what was put together from parts, as on Cloud Storage."""
    component_count: int | None
    """Objects that a composed one was made of; None for any other."""
    updated: datetime
    attributes: Attributes

    @property
    def uri(self) -> str:
        """`gs://` URI, without the generation."""
        return f"gs://{self.bucket}/{self.name}"

    @property
    def content_type(self) -> str:
        """Media type."""
        return self.attributes.content_type

    @property
    def metadata(self) -> Mapping[str, str]:
        """The writer's own keys and values."""
        return self.attributes.metadata

    @property
    def time_created(self) -> datetime:
        """UTC."""
        return from_microseconds(self.generation)

    @property
    def etag(self) -> str:
        """As on the JSON API: changes with the content and with the attributes."""
        return _etag(self.generation, self.metageneration)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preconditions:
    """Conditions on the live object; None asks for nothing. An object that does not exist counts as generation 0."""

    if_generation_match: int | None = None
    if_generation_not_match: int | None = None
    if_metageneration_match: int | None = None
    if_metageneration_not_match: int | None = None

    def check(self, current: StoredObject | Bucket | None, *, reading: bool = False) -> None:
        """Raises PreconditionFailedError; NotModifiedError for a read whose not-match condition failed."""
        generation = current.generation if current else 0
        metageneration = current.metageneration if current else 0
        for name, wanted, actual in (
            ("ifGenerationMatch", self.if_generation_match, generation),
            ("ifMetagenerationMatch", self.if_metageneration_match, metageneration),
        ):
            if wanted is not None and wanted != actual:
                raise PreconditionFailedError(_condition_message(name, wanted, actual))
        for name, unwanted, actual in (
            ("ifGenerationNotMatch", self.if_generation_not_match, generation),
            ("ifMetagenerationNotMatch", self.if_metageneration_not_match, metageneration),
        ):
            if unwanted is not None and unwanted == actual:
                error = NotModifiedError if reading else PreconditionFailedError
                raise error(_condition_message(name, unwanted, actual))


def check_bucket_name(name: str) -> None:
    """Raises InvalidRequestError."""
    parts_fit = all(len(part) <= 63 for part in name.split("."))
    if not (_BUCKET_NAME.fullmatch(name) and parts_fit) or _IP_ADDRESS.fullmatch(name):
        raise InvalidRequestError(
            f"Invalid bucket name: {name!r}. A name has 3 to 63 characters of a-z, 0-9, '-', '_' and '.', "
            "starts and ends with a letter or digit, and is not an IP address."
        )


def check_object_name(name: str) -> None:
    """Raises InvalidRequestError."""
    reserved = name in {".", ".."} or name.startswith(".well-known/acme-challenge/")
    if not 1 <= len(name.encode()) <= _OBJECT_NAME_BYTES or reserved or "\r" in name or "\n" in name:
        raise InvalidRequestError(
            f"Invalid object name: {name[:80]!r} ({len(name.encode())} bytes). A name has 1 to {_OBJECT_NAME_BYTES} "
            "bytes of UTF-8 without carriage return and line feed, and is not '.' or '..'."
        )


def from_microseconds(value: int) -> datetime:
    """UTC time of a generation or of a kept time."""
    seconds, microseconds = divmod(value, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def _etag(generation: int, metageneration: int) -> str:
    # Opaque to clients. Cloud Storage shows the same two numbers, as a small protocol buffer in base64.
    return base64.b64encode(b"\x08" + _varint(generation) + b"\x10" + _varint(metageneration)).decode()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _condition_message(name: str, wanted: int, actual: int) -> str:
    return (
        "At least one of the pre-conditions you specified did not hold: "
        f"{name}={wanted}, and the live value is {actual} (0: it does not exist)."
    )
