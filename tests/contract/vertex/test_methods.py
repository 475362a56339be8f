"""What is read off the installed client libraries is still there: private names may go with any release."""

from __future__ import annotations

import pytest

from penstock_local.api.dispatch import Dispatcher
from penstock_local.api.methods import methods
from penstock_local.api.rest_app import template_pattern
from penstock_local.services.cloud_logging import LoggingService
from penstock_local.services.custom_jobs import JobService
from penstock_local.services.models import ModelService
from penstock_local.services.pipelines import PipelineService
from penstock_local.services.projects import Projects
from penstock_local.services.schedules import ScheduleService

# Public functions of a service that are for the stand-in itself.
_INTERNAL = {
    "signal_replica", "fail_interrupted", "shut_down", "move_to_running", "running_of_schedule", "create_scheduled_job", "start", "fire_due",
    "clock",
}  # fmt: skip
SERVICES: dict[str, type[object]] = {
    "JobService": JobService,
    "ModelService": ModelService,
    "PipelineService": PipelineService,
    "ScheduleService": ScheduleService,
    "Projects": Projects,
    "LoggingServiceV2": LoggingService,
}


@pytest.mark.parametrize("service", SERVICES)
def test_every_handler_answers_a_method_that_grpc_and_rest_both_know(service: str) -> None:
    dispatcher = Dispatcher(methods(), SERVICES)
    names = {
        name
        for name in vars(SERVICES[service])
        if not name.startswith("_") and callable(getattr(SERVICES[service], name))
    }
    paths = [path for path in dispatcher.implemented if f".{service}/" in path]
    assert len(paths) == len(names - _INTERNAL), "a handler is named for no method"
    for path in paths:
        method = dispatcher.methods[path]
        assert method.request_type is not None
        assert method.response_type is not None
        assert method.routes, path


def test_one_template_alone_matches_a_url() -> None:
    routes = {
        route.template: method.name
        for method in methods().values()
        for route in method.routes
        if template_pattern(route.template).fullmatch(
            "/v1/projects/demo/locations/us-central1/customJobs/1:cancel"
        )
    }
    assert set(routes.values()) == {"CancelCustomJob"}
