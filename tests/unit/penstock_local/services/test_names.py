from __future__ import annotations

import pytest

from penstock_local.api.errors import InvalidArgumentError
from penstock_local.services.names import Place, checked_job_id

PLACE = Place("demo", 42)


@pytest.mark.parametrize("project", ["demo", "42"])
def test_a_project_may_be_named_by_id_or_number(project: str) -> None:
    assert PLACE.parent(f"projects/{project}/locations/l") == "projects/42/locations/l"
    assert PLACE.name(f"projects/{project}/locations/l/models/7@2") == "projects/42/locations/l/models/7@2"


@pytest.mark.parametrize(
    "given", ["", "projects/other/locations/l", "projects/demo", "projects/demo/locations/l/x"]
)
def test_another_parent_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match="projects/demo/locations/LOCATION"):
        PLACE.parent(given)


@pytest.mark.parametrize(
    "given", ["", "models/7", "projects/demo/locations/l", "projects/other/locations/l/models/7"]
)
def test_another_name_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError):
        PLACE.name(given)


@pytest.mark.parametrize("given", ["a", "run-1", "a" * 128])
def test_a_pipeline_job_id_is_what_vertex_takes(given: str) -> None:
    assert checked_job_id(given) == given


@pytest.mark.parametrize("given", ["", "1a", "A", "a_b", "a" * 129, "../a", "a\n"])
def test_another_pipeline_job_id_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match="pipeline_job_id"):
        checked_job_id(given)
