"""What Cloud Storage answers when it says no, in the words of both of its APIs."""

from __future__ import annotations

from typing import Any


class StorageError(Exception):
    """A request that is answered with an error.

    StorageError
    |-- InvalidRequestError          400, a name, parameter or body that is wrong
    |   |-- ChecksumMismatchError    the bytes are not those that the client hashed; nothing is stored
    |   `-- InvalidPartError         a multipart upload cannot be completed from these parts
    |-- NotFoundError                404
    |   |-- BucketNotFoundError
    |   |-- ObjectNotFoundError      no such object, or not that generation of it
    |   `-- UploadNotFoundError      no such session, or one of an earlier start of the server
    |-- ConflictError                409
    |   |-- BucketExistsError
    |   `-- BucketNotEmptyError
    |-- PreconditionFailedError      412
    |-- NotModifiedError             304, a read whose not-match condition failed
    |-- RangeNotSatisfiableError     416
    `-- UnsupportedError             501, Cloud Storage does it, the stand-in does not; the message names the input
    """

    status = 500
    reason = "internalError"
    xml_code = "InternalError"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The body on the JSON API."""
        cause = {"message": str(self), "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": str(self), "errors": [cause]}}


class InvalidRequestError(StorageError):
    """A name, parameter or body is wrong."""

    status, reason, xml_code = 400, "invalid", "InvalidArgument"


class ChecksumMismatchError(InvalidRequestError):
    """The bytes that arrived are not those that the client hashed; nothing is stored."""

    xml_code = "BadDigest"


class InvalidPartError(InvalidRequestError):
    """A multipart upload cannot be completed from the parts named."""

    xml_code = "InvalidPart"


class NotFoundError(StorageError):
    """No such resource."""

    status, reason, xml_code = 404, "notFound", "NoSuchKey"


class BucketNotFoundError(NotFoundError):
    """No such bucket."""

    xml_code = "NoSuchBucket"


class ObjectNotFoundError(NotFoundError):
    """No such object, or not that generation of it."""


class UploadNotFoundError(NotFoundError):
    """No such upload; sessions do not survive a restart of the server."""

    xml_code = "NoSuchUpload"


class ConflictError(StorageError):
    """The state of the resource does not allow it."""

    status, reason, xml_code = 409, "conflict", "Conflict"


class BucketExistsError(ConflictError):
    """The name of the bucket is taken."""

    xml_code = "BucketAlreadyOwnedByYou"


class BucketNotEmptyError(ConflictError):
    """Only empty buckets can be deleted."""

    xml_code = "BucketNotEmpty"


class PreconditionFailedError(StorageError):
    """A condition on generation, metageneration or ETag did not hold; nothing was changed."""

    status, reason, xml_code = 412, "conditionNotMet", "PreconditionFailed"


class NotModifiedError(StorageError):
    """A read asked for anything but what is there."""

    status, reason, xml_code = 304, "notModified", "NotModified"


class RangeNotSatisfiableError(StorageError):
    """The range starts behind the end of the object."""

    status, reason, xml_code = 416, "requestedRangeNotSatisfiable", "InvalidRange"

    def __init__(self, message: str, *, size: int) -> None:
        super().__init__(message)
        self._size = size

    @property
    def headers(self) -> dict[str, str]:
        """Tells the size of the object."""
        return {"content-range": f"bytes */{self._size}"}


class UnsupportedError(StorageError):
    """Cloud Storage does it, the stand-in does not; the message names the input."""

    status, reason, xml_code = 501, "notImplemented", "NotImplemented"
