"""The whole stand-in, wired: front door, API, Cloud Storage and jobs of one state directory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock_local.api.dispatch import Dispatcher
from penstock_local.api.grpc_server import start_grpc_server
from penstock_local.api.methods import methods
from penstock_local.api.rest_app import build_rest_app
from penstock_local.control import build_control_app
from penstock_local.faults.board import FaultBoard
from penstock_local.faults.requests import CUT, Dated, FaultyStorage
from penstock_local.frontdoor.auth import RequireToken, TokenVerifier
from penstock_local.frontdoor.certificates import Identity, make_identity
from penstock_local.frontdoor.environment import ClientEnvironment, client_environment
from penstock_local.frontdoor.proxy import Backends, FrontDoor, is_served
from penstock_local.jobs.images import load_image_map
from penstock_local.jobs.processes import ProcessRecord
from penstock_local.logs import LogStore
from penstock_local.services.cloud_logging import LoggingService
from penstock_local.services.custom_jobs import JobRuntime, JobService, JobValidator
from penstock_local.services.models import ModelService
from penstock_local.services.names import Place
from penstock_local.services.pipelines import PipelineService
from penstock_local.services.projects import Projects
from penstock_local.services.resources import ResourceStore
from penstock_local.services.schedules import ScheduleService
from penstock_local.state import ServerInfo, StateDirectory
from penstock_local.storage import ObjectStore, build_app
from penstock_local.storage.errors import StorageError

logger = logging.getLogger(__name__)

PROJECT_NUMBER = 123456789012
"""Of the one project that is served; buckets carry it too, as the SDK compares the two."""


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalVertexConfig:
    """One stand-in."""

    state: Path
    """Directory of everything it keeps."""
    project_id: str = "demo"
    location: str = "us-central1"
    buckets: tuple[str, ...] = ()
    """Made at the start unless they exist."""
    images: Path | None = None
    """Image map (TOML); without one only the built-in images are known."""
    job_validator: str = ""
    """`module:function` that takes a CustomJob as REST JSON and returns findings."""
    port: int = 0
    """Of the front door; 0 takes a free one."""


@dataclass
class LocalVertex:
    """A stand-in: `await start()`, then `await stop()`. Holds its state directory in between."""

    config: LocalVertexConfig
    front_door: FrontDoor = field(init=False)
    services: dict[str, Any] = field(init=False)
    objects: ObjectStore = field(init=False)
    faults: FaultBoard = field(init=False)

    async def start(self) -> ServerInfo:
        """Take the state directory, bring everything up, and publish `server.json`.

        Raises StateInUseError, ImageMapError, ConfigError, or OSError when the state directory cannot be written.
        """
        config = self.config
        self._state = StateDirectory(config.state.absolute())
        self._lock = self._state.lock()
        record = ProcessRecord(self._state.processes)
        record.kill_leftovers()
        for directory in (self._state.work, self._state.temporary):
            shutil.rmtree(directory, ignore_errors=True)
        self._state.temporary.mkdir()

        listener = _listen(config.port)
        front_port: int = listener.getsockname()[1]
        identity = make_identity(
            self._state.identity,
            project_id=config.project_id,
            token_uri=f"http://127.0.0.1:{front_port}/token",
        )
        environment = client_environment(
            identity, front_port=front_port, project_id=config.project_id, location=config.location
        )
        verifier = TokenVerifier(identity.credentials_file)
        self._open_stores()
        self.services = self._build_services(environment, record)
        self.front_door = FrontDoor(self._serve(identity, verifier))
        await self.front_door.start(listener)

        info = ServerInfo(
            os.getpid(), front_port, config.project_id, config.location, environment.set, environment.unset
        )
        self._state.publish(info)
        return info

    async def stop(self) -> None:
        """Cancel what runs, wait until no process is left, and give the state directory back."""
        for name in ("ScheduleService", "PipelineService", "JobService"):
            await asyncio.to_thread(self.services[name].shut_down)
        await self.front_door.stop()
        for server in self._http_servers:
            server.should_exit = True
        await asyncio.gather(*self._http_tasks)
        await asyncio.to_thread(self._grpc_server.stop(grace=1).wait)
        for store in (self._resources, self._logs, self.objects):
            store.close()
        self._state.withdraw()  # last: until here the state directory is in use
        self._lock.close()

    def status(self) -> dict[str, Any]:
        """What the control API shows."""
        return {
            "project": self.config.project_id,
            "location": self.config.location,
            "pid": os.getpid(),
            "refused": self.front_door.refused,
        }

    def _open_stores(self) -> None:
        self._resources = ResourceStore(self._state.database)
        self._logs = LogStore(self._state.log_database)
        self.objects = ObjectStore(self._state.objects)
        self.faults = FaultBoard(self.objects)
        standing = {bucket.name for bucket in self.objects.list_buckets()}
        for bucket in self.config.buckets:
            if bucket not in standing:
                try:
                    self.objects.create_bucket(bucket, location=self.config.location.upper())
                except StorageError as exc:
                    raise ConfigError(f"bucket {bucket!r} cannot be made: {exc}") from exc

    def _build_services(self, environment: ClientEnvironment, record: ProcessRecord) -> dict[str, Any]:
        place = Place(self.config.project_id, PROJECT_NUMBER)
        images = load_image_map(self.config.images)
        runtime = JobRuntime(
            images=images,
            logs=self._logs,
            record=record,
            objects=self.objects,
            client_environment={
                **environment.set,
                # Temporary files of tasks and replicas stay below the state directory as well.
                "TMPDIR": str(self._state.temporary),
                # Replicas of a job talk over loopback; gloo would otherwise look the machine's name up.
                "GLOO_SOCKET_IFNAME": "lo",
            },
            work_dir=self._state.work / "jobs",
            faults=self.faults,
            validator=_load_validator(self.config.job_validator),
        )
        jobs = JobService(self._resources, place, runtime)
        pipelines = PipelineService(
            self._resources, place, runtime, objects=self.objects, work_dir=self._state.work / "pipelines"
        )
        schedules = ScheduleService(self._resources, place, pipelines)
        jobs.fail_interrupted()
        pipelines.fail_interrupted()
        schedules.start()
        return {
            "JobService": jobs,
            "PipelineService": pipelines,
            "ScheduleService": schedules,
            "ModelService": ModelService(self._resources, place),
            "Projects": Projects(place),
            "LoggingServiceV2": LoggingService(self._logs, place),
        }

    def _serve(self, identity: Identity, verifier: TokenVerifier) -> Backends:
        dispatcher = Dispatcher(methods(), self.services)
        self._grpc_server: grpc.Server
        self._grpc_server, grpc_port = start_grpc_server(dispatcher, identity, verifier)
        storage = build_app(self.objects, project_id=self.config.project_id, project_number=PROJECT_NUMBER)
        faulty = FaultyStorage(storage, self.faults)
        hosts = ByHost({"storage.googleapis.com": faulty}, default=build_rest_app(dispatcher))
        control = build_control_app(
            verifier,
            status=self.status,
            signal_replica=self.services["JobService"].signal_replica,
            faults=self.faults,
        )
        served = Dated(RequireToken(hosts, verifier, host_allowed=is_served))
        self._http_servers = [_HttpServer(served, identity), _HttpServer(control, None)]
        self._http_tasks = [asyncio.create_task(server.run_on_own_socket()) for server in self._http_servers]
        https_port, control_port = (server.port for server in self._http_servers)
        return Backends(grpc_port=grpc_port, https_port=https_port, control_port=control_port)


class ByHost:
    """ASGI: requests by their Host header."""

    def __init__(self, apps: Mapping[str, ASGIApp], *, default: ASGIApp) -> None:
        self._apps = apps
        self._default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the app of its host."""
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", b"").decode("latin-1").partition(":")[0]
        await self._apps.get(host, self._default)(scope, receive, send)


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 whose apps can cut the connection."""

    def on_message_begin(self) -> None:
        """A request begins, which gets its scope."""
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"now": self.transport.abort}}


class _HttpServer(uvicorn.Server):
    """uvicorn on a loopback port that is known before it serves; signals stay with the program that runs it."""

    def __init__(self, app: ASGIApp, identity: Identity | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                lifespan="off",
                log_level="warning",
                access_log=False,
                date_header=False,  # see faults.requests.Dated
                ssl_certfile=identity.leaf_file if identity else None,
                ssl_keyfile=identity.leaf_key_file if identity else None,
            )
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    async def run_on_own_socket(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve(sockets=[self._socket])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers alone."""
        yield


def _load_validator(path: str) -> JobValidator | None:
    """The function that `module:function` names. Raises ConfigError."""
    if not path:
        return None
    module, _, function = path.partition(":")
    try:
        validator: JobValidator = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"job validator {path!r} is not MODULE:FUNCTION of this environment: {exc}"
        ) from exc
    return validator


def _listen(port: int) -> socket.socket:
    """Raises ConfigError when the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on 127.0.0.1:{port} ({exc.strerror}); give another port, or 0 for a free one."
        ) from exc
