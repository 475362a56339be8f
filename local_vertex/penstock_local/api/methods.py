"""Every RPC of the services spoken here, read off the installed client libraries.

google-cloud-aiplatform ships clients only, no servicers. Their transports know each method's path, request class and
response class, and their REST bases know the URL templates; reading those gives a server that cannot drift from the
client it serves. The transports' stub properties are public; the REST bases' `_get_http_options` is not, so a
contract test asserts that every method implemented here is still found with its routes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# (package, service class name)
_SERVICES = (
    ("google.cloud.aiplatform_v1.services.job_service", "JobService"),
    ("google.cloud.aiplatform_v1.services.pipeline_service", "PipelineService"),
    ("google.cloud.aiplatform_v1.services.model_service", "ModelService"),
    ("google.cloud.aiplatform_v1.services.schedule_service", "ScheduleService"),
    ("google.cloud.resourcemanager_v3.services.projects", "Projects"),
    ("google.cloud.logging_v2.services.logging_service_v2", "LoggingServiceV2"),
)

# The logging client has no REST transport to read; this is the route of its google.api.http annotation.
_EXTRA_ROUTES = {
    "/google.logging.v2.LoggingServiceV2/ListLogEntries": [
        {"method": "post", "uri": "/v2/entries:list", "body": "*"},
    ],
}


@dataclass(frozen=True, slots=True)
class Route:
    """One REST form of a method."""

    http_method: str
    """Upper case."""
    template: str
    """Such as `/v1/{parent=projects/*/locations/*}/customJobs`."""
    body: str
    """Request field that the body holds, `*` for the whole request, empty for none."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC."""

    path: str
    """Such as `/google.cloud.aiplatform.v1.JobService/CreateCustomJob`."""
    request_type: Any
    """proto-plus or protobuf message class."""
    response_type: Any
    routes: tuple[Route, ...]

    @property
    def name(self) -> str:
        """Such as `CreateCustomJob`."""
        return self.path.rpartition("/")[2]


def methods() -> dict[str, Method]:
    """All unary methods of the services, by path. Imports the client libraries: about 1.5 CPU seconds."""
    return {method.path: method for package, service in _SERVICES for method in _methods_of(package, service)}


def _methods_of(package: str, service: str) -> Iterator[Method]:
    transport = getattr(importlib.import_module(f"{package}.transports.grpc"), f"{service}GrpcTransport")
    channel = _RecordingChannel()
    instance = transport.__new__(transport)  # no channel is opened
    instance._stubs = {}
    instance._logged_channel = channel
    for name, member in vars(transport).items():
        if isinstance(member, property) and name not in ("kind", "grpc_channel", "operations_client"):
            member.fget(instance)  # type: ignore[misc]  # these properties have getters
    for path, request_type, response_type in channel.recorded:
        if f".{service}/" in path and request_type is not None:
            routes = tuple(_routes(package, service, path))
            yield Method(path, request_type, response_type, routes)


def _routes(package: str, service: str, path: str) -> Iterator[Route]:
    options = _EXTRA_ROUTES.get(path)
    if options is None:
        try:
            module = importlib.import_module(f"{package}.transports.rest_base")
        except ModuleNotFoundError:
            return
        base = getattr(module, f"_Base{service}RestTransport")
        holder = getattr(base, f"_Base{path.rpartition('/')[2]}", None)
        options = holder._get_http_options() if holder is not None else []
    for option in options:
        yield Route(option["method"].upper(), option["uri"], option.get("body", ""))


class _RecordingChannel:
    """Stands where a transport expects its gRPC channel, and notes what each stub would be made of."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, Any, Any]] = []

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[..., bytes] | None = None,
        response_deserializer: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        self.recorded.append((path, _owner(request_serializer), _owner(response_deserializer)))

    def unary_stream(self, *_: Any, **__: Any) -> None:
        """Streaming methods are not served."""

    stream_unary = stream_stream = unary_stream


def _owner(bound: Callable[..., Any] | None) -> Any:
    """The message class of `Class.serialize` or `Class.FromString`."""
    return getattr(bound, "__self__", None)
