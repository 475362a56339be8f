"""Errors of the API, as gRPC status and as HTTP answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import grpc

_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class ApiError(Exception):
    """A request that is answered with an error.

    ApiError
    ├── InvalidArgumentError     the request is wrong; the message names the field
    ├── NotFoundError            no such resource
    ├── AlreadyExistsError       the id is taken
    ├── FailedPreconditionError  the resource is not in a state that allows it
    ├── UnavailableError         not now
    └── UnimplementedError       the real service does it, the stand-in does not; the message names the field
    """

    code = grpc.StatusCode.INTERNAL

    @property
    def http_status(self) -> int:
        """The status code over REST."""
        return int(_HTTP_STATUS[self.code])

    def to_json(self) -> dict[str, Any]:
        """The body over REST, in the form of Google APIs."""
        return {"error": {"code": self.http_status, "message": str(self), "status": self.code.name}}


class InvalidArgumentError(ApiError):
    """The request is wrong; the message names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(ApiError):
    """No such resource."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(ApiError):
    """The id is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(ApiError):
    """The resource is not in a state that allows it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnavailableError(ApiError):
    """Not now; a later attempt may be answered."""

    code = grpc.StatusCode.UNAVAILABLE


class UnimplementedError(ApiError):
    """The real service does it, the stand-in does not; the message names the method or the field."""

    code = grpc.StatusCode.UNIMPLEMENTED
