from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, job_service
from starlette.testclient import TestClient

from penstock_local.api.dispatch import Dispatcher
from penstock_local.api.errors import NotFoundError
from penstock_local.api.methods import Method, Route, methods
from penstock_local.api.rest_app import build_rest_app, template_pattern

JOB = "projects/p/locations/l/customJobs/7"


@pytest.mark.parametrize(
    ("template", "path", "fields"),
    [
        ("/v1/{name=projects/*/locations/*/customJobs/*}", f"/v1/{JOB}", {"name": JOB}),
        ("/v1/{name=projects/*/locations/*/customJobs/*}", f"/v1/{JOB}:cancel", None),
        ("/v1/{name=projects/*/locations/*/customJobs/*}", f"/v1/{JOB}/x", None),
        ("/v1/{name=projects/*/locations/*/customJobs/*}:cancel", f"/v1/{JOB}:cancel", {"name": JOB}),
        ("/v1/{parent=projects/*}/models", "/v1/projects/p/models", {"parent": "projects/p"}),
        ("/v1/{model.name=models/*}", "/v1/models/3@champion", {"model__name": "models/3@champion"}),
        ("/v1/{name=operations/**}", "/v1/operations/a/b", {"name": "operations/a/b"}),
        ("/v2/entries:list", "/v2/entries:list", {}),
        ("/v1/{name}", "/v1/x", {"name": "x"}),
        ("/v1/a.b", "/v1/aXb", None),
    ],
)
def test_templates_match_as_google_api_http_has_it(
    template: str, path: str, fields: dict[str, str] | None
) -> None:
    match = template_pattern(template).fullmatch(path)
    assert (match.groupdict() if match else None) == fields


class Jobs:
    """Answers with what it was asked."""

    def create_custom_job(self, request: Any, _: Any) -> CustomJob:
        job = CustomJob(request.custom_job)
        job.name = request.parent
        return job

    def get_custom_job(self, request: Any, context: Any) -> CustomJob:
        if request.name.endswith("/0"):
            raise NotFoundError("there is no job 0.")
        if request.name.endswith("/1"):
            raise ZeroDivisionError("a defect")
        return CustomJob(name=request.name, display_name=context.user_agent, state="JOB_STATE_FAILED")

    def list_custom_jobs(self, request: Any, _: Any) -> Any:
        told = CustomJob(display_name=f"{request.filter}|{request.page_size}")
        return job_service.ListCustomJobsResponse(custom_jobs=[told])


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = build_rest_app(Dispatcher(methods(), {"JobService": Jobs()}))
    return TestClient(app)


def test_a_body_becomes_the_field_that_the_route_names(client: TestClient) -> None:
    posted = {"displayName": "a", "jobSpec": {"worker_pool_specs": [{"replicaCount": "1"}]}}
    answer = client.post("/v1/projects/p/locations/l/customJobs", json=posted)
    assert answer.json()["name"] == "projects/p/locations/l"
    assert answer.json()["jobSpec"] == {"workerPoolSpecs": [{"replicaCount": "1"}]}


def test_query_parameters_become_fields_and_system_parameters_do_not(client: TestClient) -> None:
    query = {"filter": "a=b", "pageSize": "3", "$alt": "json;enum-encoding=int", "prettyPrint": "false"}
    answer = client.get("/v1/projects/p/locations/l/customJobs", params=query)
    assert answer.json()["customJobs"][0]["displayName"] == "a=b|3"


def test_enums_are_names_unless_numbers_are_asked_for(client: TestClient) -> None:
    headers = {"x-goog-api-client": "me"}
    assert client.get(f"/v1/{JOB}", headers=headers).json() == {
        "name": JOB,
        "displayName": "me",
        "state": "JOB_STATE_FAILED",
    }
    assert client.get(f"/v1/{JOB}?$alt=json;enum-encoding=int").json()["state"] == 5


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "told"),
    [
        ("POST", "/v1/projects/p/locations/l/customJobs", b"{", 400, "the body is not JSON"),
        ("POST", "/v1/projects/p/locations/l/customJobs", b"[1]", 400, "must be a JSON object, not list"),
        ("POST", "/v1/projects/p/locations/l/customJobs", b"\xff", 400, "the body is not JSON"),
        ("POST", "/v1/projects/p/locations/l/customJobs", b'{"nodes": 1}', 400, "nodes"),
        ("POST", "/v1/projects/p/locations/l/customJobs", b'{"displayName": 1}', 400, "display"),
        ("GET", "/v1/projects/p/locations/l/customJobs?nodes=1", b"", 400, "nodes"),
        ("GET", "/v1/projects/p/locations/l/customJobs/0", b"", 404, "there is no job 0"),
        ("GET", "/v1/projects/p/locations/l/customJobs/1", b"", 500, "ZeroDivisionError('a defect')"),
        ("DELETE", f"/v1/{JOB}", b"", 404, "not a method"),
        ("GET", "/v1/nothing", b"", 404, "not a method"),
    ],
)
def test_errors_have_the_form_of_google_apis(
    client: TestClient, method: str, path: str, body: bytes, code: int, told: str
) -> None:
    answer = client.request(method, path, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (code, code)
    assert told in error["message"]
    assert error["status"]


def test_the_dispatcher_finds_handlers_by_the_snake_case_of_the_method() -> None:
    method = Method("/a.b.Things/ListBigThings", None, None, (Route("GET", "/v1/things", ""),))
    service = SimpleNamespace(list_big_things=lambda request, _: json.dumps(request))
    dispatcher = Dispatcher({method.path: method}, {"Things": service})
    assert dispatcher.implemented == ["/a.b.Things/ListBigThings"]
    assert dispatcher.call(method, 1, None) == "1"  # type: ignore[arg-type]  # the handler does not look at it
    assert Dispatcher({method.path: method}, {}).implemented == []
